"""Benchmark of the evaluation's speed: the same samples in plain lm-eval and here.

    OMP_NUM_THREADS=1 python -m rope_patch.benchmarks.prefix_sharing demo --out FILE

Plain lm-eval reads every sample's whole prompt, and each choice's again, computes logits for all of
it, and decodes one answer after another. Here the common prefix of samples is read once, whether
answers are generated, scored or chosen; logits are computed only where they are scored, and answers
to questions on one text are decoded together. Both answer the same lm-eval tasks with the same
weights, and must agree.

The tasks of one length that ask about the same texts (`rp_count`, `rp_count_ll`) are a piece. With
`--out`, each piece is stored when it is done, and the same command goes on behind the last one.
"""

from __future__ import annotations

import json
import logging
import time
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lm_eval.models.huggingface import HFLM

from rope_patch import tasks
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.profiles import PROFILES
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_model, read_tokenizer
from rope_patch.utils import atomic_files, provenance

DEPTHS = [10, 30, 50, 70, 90]
_TOLERANCE = 1e-2  # nats of a target's log-likelihood


def main(
    model: Annotated[str, typer.Argument(help="A folder, a name on the Hub, or `demo`.")],
    lengths: Annotated[str, typer.Option(help="In tokens, by commas.")] = "8192",
    task: Annotated[
        str,
        typer.Option(
            help="Our tasks or groups, by commas; the retrieval tasks of the profile `standard` "
            "unless given."
        ),
    ] = "",
    samples: Annotated[int, typer.Option(help="Of each task at each length.", min=1)] = 4,
    per_text: Annotated[int, typer.Option(help="Samples that share a text.", min=1)] = 4,
    out: Annotated[Path | None, typer.Option(help="A file for the results as JSON.")] = None,
) -> None:
    """Time plain lm-eval and this package's evaluation on the same samples."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = tasks.expand(task.split(",") if task else list(PROFILES["standard"].tasks))
    names = [name for name in names if name in tasks.names()]
    path = demo.resolve_model_path(model)
    tokenizer = read_tokenizer(path)
    tokenizer.model_max_length = 10**9
    on_gpu = torch.cuda.is_available()
    dtype: Any = "auto" if on_gpu else torch.float32
    weights = read_model(path, dtype=dtype).to("cuda" if on_gpu else "cpu")
    request = {"model": model, "samples": samples, "per_text": per_text, "depths": DEPTHS}
    rows = _earlier_rows(out, request)
    names = sorted(names, key=lambda name: (tasks.text_of(name), name))
    pieces = [list(alike) for _, alike in groupby(names, key=tasks.text_of)]
    for length in [int(length) for length in lengths.split(",")]:
        for alike in pieces:
            if any((row["tasks"], row["length"]) == (alike, length) for row in rows):
                continue
            built = [
                lm_eval_tasks.build(name, tokenizer, [length], samples, DEPTHS, per_text=per_text)[
                    0
                ]
                for name in alike
            ]
            rows.append({"tasks": alike, "length": length} | _time(weights, tokenizer, built))
            print(_line(rows[-1]), flush=True)
            if out is not None:
                report = request | {"rows": rows, "total": _total(rows)}
                report |= {"versions": provenance.versions(), "hardware": provenance.hardware()}
                atomic_files.write_json(out, {**report, "date": provenance.now()})
    total = _total(rows)
    print(f"all: {total['cpu_ratio']:.2f} times less CPU time")
    if not (total["same_scores"] and total["largest_difference_nats"] < _TOLERANCE):
        raise SystemExit("the scores differ")


def _earlier_rows(out: Path | None, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that an earlier run of the same request stored."""
    if out is None or not out.exists():
        return []
    report = json.loads(out.read_text())
    if wrong := [key for key in request if report.get(key) != request[key]]:
        raise ValueError(
            f"{out} has results for another {', '.join(wrong)}: give another file, or delete it"
        )
    return list(report["rows"])


def _time(weights: Any, tokenizer: Any, built: list[Any]) -> dict[str, Any]:
    """Return times and scores of tasks of one length, from both."""
    length = built[0].config.metadata["length"]
    # lm-eval counts the room of generated answers towards `max_length`; no prompt is cut.
    plain = HFLM(pretrained=weights, tokenizer=tokenizer, batch_size=1, max_length=length)
    ours = LongContextLM(weights, tokenizer, length, {}, label=f"ours at {length:,}")
    seconds, cpu, scores = {}, {}, {}
    for name, lm in (("ours", ours), ("lm_eval", plain)):
        before, cpu_before = time.perf_counter(), time.process_time()
        results = lm_eval_tasks.evaluate(lm, built)
        seconds[name] = time.perf_counter() - before
        cpu[name] = time.process_time() - cpu_before
        failures = ours.failures if lm is ours else {}
        scores[name] = lm_eval_tasks.scores(results, failures)
    pairs = list(zip(scores["ours"], scores["lm_eval"], strict=True))
    nats = [
        abs(float(a["log_likelihood"]) - float(b["log_likelihood"]))
        for a, b in pairs
        # Plain lm-eval scores no target after generated answers.
        if a["log_likelihood"] is not None and b["log_likelihood"] is not None
    ]
    return {
        "samples": len(pairs),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "cpu_ratio": cpu["lm_eval"] / cpu["ours"],
        "tokens_asked": ours.prompt_tokens,
        "tokens_read": ours.computed_tokens,
        "scores": {name: [row["score"] for row in rows] for name, rows in scores.items()},
        "largest_difference_nats": max(nats, default=None),
    }


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over tasks."""
    cpu = {name: sum(row["cpu_seconds"][name] for row in rows) for name in ("ours", "lm_eval")}
    nats = [row["largest_difference_nats"] for row in rows]
    return {
        "tasks": sum(len(row["tasks"]) for row in rows),
        "samples": sum(row["samples"] for row in rows),
        "cpu_seconds": cpu,
        "cpu_ratio": cpu["lm_eval"] / cpu["ours"],
        "same_scores": all(row["scores"]["ours"] == row["scores"]["lm_eval"] for row in rows),
        "largest_difference_nats": max((n for n in nats if n is not None), default=0.0),
    }


def _line(row: dict[str, Any]) -> str:
    ours, plain = row["cpu_seconds"]["ours"], row["cpu_seconds"]["lm_eval"]
    same = "same" if row["scores"]["ours"] == row["scores"]["lm_eval"] else "OTHER"
    nats, names = row["largest_difference_nats"], ", ".join(row["tasks"])
    return (
        f"{names}: {row['samples']} samples of {row['length']:,} tokens: CPU time "
        f"{ours:,.0f} s here, {plain:,.0f} s in plain lm-eval, {row['cpu_ratio']:.2f} times; "
        f"{row['tokens_read']:,} of {row['tokens_asked']:,} tokens read; {same} scores"
        + ("" if nats is None else f", log-likelihoods within {nats:.1e} nats")
    )


if __name__ == "__main__":
    typer.run(main)
