"""Retrieval through lm-eval: one task for each length, every answer kept, runs continued."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from rope_patch.eval import files, tasks
from rope_patch.eval.language_model import LongContextLM
from rope_patch.patching.swap import Swaps

SUFFIX = "@"  # niah_single@4096 is the task niah_single at 4,096 tokens


def build(
    name: str, tokenizer: Any, lengths: list[int], limit: int, depths: list[int], seed: int
) -> list[Any]:
    """Builds a task once for each length; they serve for every method.

    Args:
        name: One of `tasks.names()`.
        tokenizer: The model's tokenizer.
        lengths: In tokens.
        limit: Samples at each length.
        depths: Where needles go, in percent.
        seed: For the samples.

    Returns:
        lm-eval task objects.
    """
    from lm_eval.api.task import ConfigurableTask

    built = []
    for length in lengths:
        config = tasks.config(name)
        metadata = {
            **config["metadata"],
            "tokenizer": tokenizer,
            "length": length,
            "samples": limit,
            "depths": depths,
            "seed": seed,
        }
        config |= {"task": f"{name}{SUFFIX}{length}", "metadata": metadata}
        built.append(ConfigurableTask(config=config))
    return built


def evaluate(
    lm: LongContextLM, built: list[Any], identity: dict[str, Any], folder: Path, label: str
) -> dict[str, Any]:
    """Runs tasks on a model, continuing where an earlier run with the same identity stopped.

    Args:
        lm: The model.
        built: Tasks from `build`.
        identity: What the answers depend on besides the prompts: weights, patch, dtype, kernels.
            lm-eval's cache of answers is not keyed by model; the file's name is, by this.
        folder: Where the cache and lm-eval's own results (`lm_eval-<label>.json`) go.
        label: Names the results.

    Returns:
        lm-eval's results.
    """
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    swaps = Swaps()
    # It would record the git commit of the folder that somebody happens to stand in.
    swaps.set(evaluator, "get_git_commit_hash", lambda: None)
    try:
        results: Any = evaluator.simple_evaluate(
            model=lm,
            tasks=built,
            task_manager=TaskManager(include_defaults=False),
            use_cache=str(folder / "cache" / key),
            batch_size=1,
            bootstrap_iters=0,
        )
    finally:
        swaps.undo()
    _slim(results)
    files.write_json(folder / f"lm_eval-{label}.json", results)
    return results


def cells(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Hits and the answer's probability at every length and depth.

    Args:
        results: From `evaluate`.

    Returns:
        Rows of length (tokens), depth (percent), n, hits, and answer_probability: the geometric
        mean, over the answer's tokens and samples, of the probability given to the right token.
    """
    grid: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for samples in results["samples"].values():
        for sample in samples:
            doc = sample["doc"]
            grid.setdefault((doc["length"], doc["depth"]), []).append(sample)
    rows = []
    for (length, depth), samples in sorted(grid.items()):
        likelihood = [s["answer_log_likelihood"] for s in samples if "answer_log_likelihood" in s]
        answer_tokens = [s["doc"]["answer_tokens"] for s in samples]
        rows.append(
            {
                "length": length,
                "depth": depth,
                "n": len(samples),
                "hits": int(sum(s["hit"] for s in samples)),
                "answer_probability": math.exp(sum(likelihood) / sum(answer_tokens))
                if likelihood
                else None,
            }
        )
    return rows


def _slim(results: dict[str, Any]) -> None:
    """Drops what JSON would carry twice or cannot carry: prompts, builders, tokenizers."""
    for samples in results["samples"].values():
        for sample in samples:
            sample["doc"].pop("input", None)
            sample.pop("arguments", None)
    for config in results["configs"].values():
        config.pop("custom_dataset", None)
        (config.get("metadata") or {}).pop("tokenizer", None)
