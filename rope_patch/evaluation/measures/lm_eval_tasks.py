"""The package's tasks in lm-eval: one task object for each length, and the scores of samples."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from rope_patch import tasks
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.results_schema import (
    OptionalSampleKeys,
    SampleRecord,
    UnscoredSample,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils import atomic_files

SUFFIX = "@"  # rp_vt@4096 is the task rp_vt at 4,096 tokens


def build(
    name: str, tokenizer: Any, lengths: list[int], samples: int, depths: list[int], **metadata: Any
) -> list[Any]:
    """Build a task once for each length; the task objects serve every method.

    Args:
        name: One of `tasks.names()`.
        tokenizer: The model's tokenizer.
        lengths: In tokens.
        samples: Samples at each length.
        depths: The answers' positions in percent of the text.
        **metadata: Further arguments of the task's builder: seed, per_text, text, planted,
            closed_book, chat.

    Returns:
        lm-eval task objects.
    """
    from lm_eval.api.task import ConfigurableTask

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it explains options that are set here
    task_objects = []
    for length in lengths:
        config = tasks.config(name)
        details = {"tokenizer": tokenizer, "length": length, "samples": samples, "depths": depths}
        config |= {"task": f"{name}{SUFFIX}{length}"}
        config |= {"metadata": {**config["metadata"], **details, **metadata}}
        task_objects.append(ConfigurableTask(config=config))
    return task_objects


def evaluate(
    lm: LongContextLM,
    built: list[Any],
    path: Path | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, Any]:
    """Run tasks on a model through lm-eval.

    Args:
        lm: The model; it stores its answers and continues an earlier run.
        built: Tasks from `build`, or any task objects of lm-eval.
        path: Where lm-eval's own results go, without prompts; nowhere if None.
        limit: Samples of each task; all if None.
        chat: Whether prompts are put into the tokenizer's chat template.

    Returns:
        lm-eval's results; empty on other processes than the main one, to which lm-eval gives none.
    """
    from lm_eval import evaluator
    from lm_eval.api import task
    from lm_eval.tasks import TaskManager

    # Scores come first: with them, the model also answers the other questions on their prompts.
    built = sorted(built, key=lambda one: getattr(one, "OUTPUT_TYPE", None) == "generate_until")
    swaps = UndoLog()
    swaps.set(lm, "tasks", built)
    swaps.set(task, "tqdm", lambda docs, **_: docs)  # a bar of no time at all
    # lm-eval would record the git commit of the current folder.
    swaps.set(evaluator, "get_git_commit_hash", lambda: None)
    swaps.set(evaluator, "add_env_info", lambda _: None)  # a second each time; the report has it
    try:
        results: Any = evaluator.simple_evaluate(
            model=lm,
            tasks=built,
            task_manager=TaskManager(include_defaults=False),
            batch_size=1,
            limit=limit,
            apply_chat_template=chat,
            bootstrap_iters=0,
        )
    finally:
        swaps.undo()
    if not results:
        return {}
    _drop_bulky_fields(results)
    if path is not None:
        atomic_files.write_json(path, results)
    return results


def planned_samples(task: Any) -> list[UnscoredSample]:
    """Return the samples of a task, before any is answered.

    Args:
        task: From `build`.
    """
    dataset = task.dataset["test"].remove_columns(["input"])  # prompts are long
    rows: list[UnscoredSample] = []
    for doc in dataset:
        guess = _chance(task.config.task, doc)
        chance: OptionalSampleKeys = {} if guess is None else {"chance": guess}
        row: UnscoredSample = {
            "id": doc["id"],
            "text": doc["text"],
            "length": doc["length"],
            "depth": doc["depth"],
            "target_tokens": doc["target_tokens"],
            "log_likelihood": None,
            **chance,
        }
        rows.append(row)
    return rows


def scores(results: dict[str, Any], failures: dict[tuple[str, int], str]) -> list[SampleRecord]:
    """Return the score of every sample.

    Args:
        results: From `evaluate`, of one task at one length or several.
        failures: `LongContextLM.failures`.

    Returns:
        The samples in the order in which they were built.
    """
    rows: list[SampleRecord] = []
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            doc = sample["doc"]
            error = failures.get((task, sample["doc_id"]))
            guess = _chance(task, doc)
            chance: OptionalSampleKeys = {} if guess is None else {"chance": guess}
            row: SampleRecord = {
                "id": doc["id"],
                "text": doc["text"],
                "length": doc["length"],
                "depth": doc["depth"],
                "target_tokens": doc["target_tokens"],
                "score": None if error else float(sample["score"]),
                **chance,
                "log_likelihood": None if error else sample.get("target_log_likelihood"),
                "prompt": sample["prompt_hash"],
            }
            if error:
                row["error"] = error
            rows.append(row)
    # In the order in which they were built, whatever lm-eval's was.
    return sorted(rows, key=lambda row: (row["length"], int(row["id"].rsplit("/", 1)[1])))


def _chance(task: str, doc: dict[str, Any]) -> float | None:
    """Return the expected score of a guess at a sample; None where that is 0 or not known."""
    if doc.get("choices"):
        return 1 / len(doc["choices"])
    by_likelihood = task.split(SUFFIX)[0].endswith(tasks.LIKELIHOOD)
    return doc.get("target_chance" if by_likelihood else "chance")


def choice_hits(results: dict[str, Any], failures: dict[tuple[str, int], str]) -> list[int | None]:
    """Return 1 or 0 for each sample of a multiple-choice task, None where it failed."""
    hits: list[int | None] = []
    for task, samples in results.get("samples", {}).items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            failed = (task, sample["doc_id"]) in failures
            hits.append(None if failed else round(sample[sample["metrics"][0]]))
    return hits


def answer_probability(rows: list[SampleRecord]) -> float | None:
    """Return the right answers' probability per token: geometric mean over tokens and samples.

    Args:
        rows: From `scores`.
    """
    measured = [
        (float(nats), row["target_tokens"])
        for row in rows
        if (nats := row["log_likelihood"]) is not None
    ]
    tokens = sum(count for _, count in measured)
    return math.exp(sum(nats for nats, _ in measured) / tokens) if tokens else None


def _drop_bulky_fields(results: dict[str, Any]) -> None:
    """Drop what JSON would carry twice or cannot carry: prompts, builders, tokenizers."""
    for samples in results["samples"].values():
        for sample in samples:
            if isinstance(sample["doc"], dict):
                sample["doc"].pop("input", None)
            sample.pop("arguments", None)
    for config in results["configs"].values():
        config.pop("custom_dataset", None)
        (config.get("metadata") or {}).pop("tokenizer", None)
