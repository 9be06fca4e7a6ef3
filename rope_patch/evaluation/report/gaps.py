"""Gaps: the parts of a request that a run has no number for."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.evaluation.report.format import one_line
from rope_patch.evaluation.results_schema import RunRecord, SampleRecord

_MAX_NAMES = 6  # of a sentence


def find_gaps(results: RunRecord) -> list[str]:
    """Return what is missing from one run's results, each with the reason.

    A part that failed is missing. So is a task's score at a length under a method if all of its
    samples failed. A failed sample among others is no gap: the report lists it without counting it.

    Args:
        results: One run's results.
    """
    missing = [one_line(note) for note in results["run"].get("not_run") or []]
    tasks = [(entry["task"], entry["samples"]) for entry in results.get("retrieval") or []]
    tasks += [
        (f"the control of {entry['task']}", entry["samples"])
        for entry in results.get("control") or []
    ]
    for name, samples in tasks:
        for label, rows in samples.items():
            missing += _lengths_without_score(f"{name}, {label}", rows)
    for entry in results.get("short") or []:
        for label, scores in entry["samples"].items():
            if scores and all(score is None for score in scores):
                missing.append(one_line(f"{entry['task']}, {label}: all of its samples failed"))
    return missing


def _lengths_without_score(task: str, rows: Sequence[SampleRecord]) -> list[str]:
    """Return the lengths at which no sample has a score; one entry if that is so at all lengths."""
    by_length: dict[int, list[SampleRecord]] = {}
    for row in rows:
        by_length.setdefault(row["length"], []).append(row)
    empty = {
        length: at[0].get("error")
        for length, at in by_length.items()
        if all(row["score"] is None for row in at)
    }
    if len(empty) == len(by_length) > 1:
        return [one_line(f"{task}: {next(iter(empty.values()))}")]
    return [
        one_line(f"{task}, {length:,} tokens: {reason}") for length, reason in sorted(empty.items())
    ]


def gap_sentence(missing: list[str]) -> str:
    """Return one sentence that names the gaps and how to fill them.

    Args:
        missing: From `find_gaps`; not empty.
    """
    names = [note.partition(": ")[0] for note in missing]
    shown = names[:_MAX_NAMES] + [f"{len(names) - _MAX_NAMES} more"] * (len(names) > _MAX_NAMES)
    parts = "1 part was" if len(names) == 1 else f"{len(names)} parts were"
    return (
        f"Incomplete: {parts} not measured ({'; '.join(shown)}); the same command tries again, and "
        "keeps what was measured."
    )
