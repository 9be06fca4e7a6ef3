"""Benchmark of prefix sharing: the same samples in plain lm-eval and here, timed alternately.

    python -m rope_patch.benchmarks.prefix_sharing demo --lengths 4096,8192,12288

Plain lm-eval reads every sample's whole prompt and computes logits for all of it. Here the common
prefix of samples is read once, and logits are computed only where they are scored. Both answer the
same lm-eval tasks with the same weights, and must agree.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lm_eval.models.huggingface import HFLM

from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.results_schema import SampleRecord
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_model, read_tokenizer
from rope_patch.utils import atomic_files, provenance

DEPTHS = [10, 30, 50, 70, 90]


def main(
    model: Annotated[str, typer.Argument(help="A folder, a name on the Hub, or `demo`.")],
    lengths: Annotated[str, typer.Option(help="In tokens, by commas.")] = "4096,8192",
    task: Annotated[str, typer.Option(help="One of our likelihood tasks.")] = (
        "rp_niah_multikey_1_ll"
    ),
    samples: Annotated[int, typer.Option(help="At each length.", min=1)] = 5,
    per_text: Annotated[int, typer.Option(help="Samples that share a text.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="A file for the results as JSON.")] = None,
) -> None:
    """Time plain lm-eval and this package's evaluation on the same samples."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    path, token_lengths = (
        demo.resolve_model_path(model),
        [int(length) for length in lengths.split(",")],
    )
    tokenizer = read_tokenizer(path)
    tokenizer.model_max_length = 10**9
    dtype: Any = "auto" if torch.cuda.is_available() else torch.float32
    weights = read_model(path, dtype=dtype).to("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for length in token_lengths:
        tasks = lm_eval_tasks.build(task, tokenizer, [length], samples, DEPTHS, per_text=per_text)
        plain = HFLM(pretrained=weights, tokenizer=tokenizer, batch_size=1, max_length=length)
        ours = LongContextLM(weights, tokenizer, length, {}, label=f"ours at {length:,}")
        seconds, cpu, scores = {}, {}, {}
        for name, lm in (("ours", ours), ("lm_eval", plain)):
            before, cpu_before = time.perf_counter(), time.process_time()
            results = lm_eval_tasks.evaluate(lm, tasks)
            seconds[name] = time.perf_counter() - before
            cpu[name] = time.process_time() - cpu_before
            scores[name] = lm_eval_tasks.scores(results, {})
        pairs = list(zip(scores["ours"], scores["lm_eval"], strict=True))
        largest_difference = max(abs(_nats(a) - _nats(b)) for a, b in pairs)
        rows.append(
            {
                "length": length,
                "samples": samples,
                "seconds": seconds,
                "cpu_seconds": cpu,
                "ratio": seconds["lm_eval"] / seconds["ours"],
                "cpu_ratio": cpu["lm_eval"] / cpu["ours"],
                "tokens_asked": ours.prompt_tokens,
                "tokens_read": ours.computed_tokens,
                "same_hits": all(a["score"] == b["score"] for a, b in pairs),
                "largest_difference_nats": largest_difference,
            }
        )
        print(_line(rows[-1]))
    total = {name: sum(row["cpu_seconds"][name] for row in rows) for name in ("ours", "lm_eval")}
    print(f"all: {total['lm_eval'] / total['ours']:.2f} times less CPU time")
    if out is not None:
        report = {"model": model, "task": task, "per_text": per_text, "rows": rows}
        report |= {"cpu_seconds": total, "cpu_ratio": total["lm_eval"] / total["ours"]}
        report |= {"versions": provenance.versions(), "hardware": provenance.hardware()}
        atomic_files.write_json(out, {**report, "date": provenance.now()})


def _nats(sample: SampleRecord) -> float:
    """Return the log-likelihood of a sample's right answer.

    Raises:
        ValueError: The task measures none.
    """
    nats = sample["log_likelihood"]
    if nats is None:
        raise ValueError(
            f"sample {sample['id']} has no log-likelihood: give a task that ends in _ll or _mc"
        )
    return float(nats)


def _line(row: dict[str, Any]) -> str:
    ours, plain = row["seconds"]["ours"], row["seconds"]["lm_eval"]
    return (
        f"{row['samples']} samples of {row['length']:,} tokens: {ours:,.0f} s here, {plain:,.0f} s "
        f"in plain lm-eval, {row['ratio']:.2f} times ({row['cpu_ratio']:.2f} in CPU time); "
        f"{row['tokens_read']:,} of {row['tokens_asked']:,} tokens read; "
        f"{'same' if row['same_hits'] else 'OTHER'} hits, log-likelihoods within "
        f"{row['largest_difference_nats']:.1e} nats"
    )


if __name__ == "__main__":
    typer.run(main)
