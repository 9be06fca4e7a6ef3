"""Merging runs that measured the same samples on the same weights into one with all methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

from rope_patch.evaluation.harness_schema import HarnessRecord
from rope_patch.evaluation.results_schema import (
    PerplexityRecord,
    RetrievalRecord,
    RunMetadata,
    RunRecord,
    ShortRecord,
)


class _TaskRecord(TypedDict):
    """What the records of all tasks share."""

    task: str


T = TypeVar("T", bound=_TaskRecord)


def merge_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Merge runs whose methods compare sample by sample; leave the others as they are.

    Args:
        runs: Results of evaluations.

    Returns:
        Fewer or as many results, in the order of the first of each.
    """
    merged: list[RunRecord] = []
    for run in runs:
        same = (i for i, other in enumerate(merged) if _comparable(other, run))
        if (i := next(same, None)) is None:
            merged.append(run)
        else:
            merged[i] = _merge_pair(merged[i], run)
    return merged


def _comparable(first: RunRecord, second: RunRecord) -> bool:
    """Return whether the runs differ in methods alone, and share none but the plain model."""
    shared = _labels(first) & _labels(second)
    plain = {m["label"] for m in first["methods"] if m.get("method") is None}
    has_weights = first["run"].get("weights") is not None
    return has_weights and shared <= plain and _comparison_key(first) == _comparison_key(second)


def _labels(run: RunRecord) -> set[str]:
    return {method["label"] for method in run["methods"]}


def _comparison_key(run: RunRecord) -> tuple[object, ...]:
    """Return what methods must have in common to be compared: weights, texts, tokens, samples."""
    return (
        _model_key(run["run"]),
        _perplexity_key(run.get("perplexity")),
        {
            entry["task"]: {s["id"] for rows in entry["samples"].values() for s in rows}
            for entry in run.get("retrieval") or []
        },
        {task["task"]: task["n"] for task in run.get("short") or []},
        # Costs are ratios to the first method that was measured.
        next(iter(run.get("cost") or {}), None),
    )


def _model_key(run: RunMetadata) -> tuple[object, ...]:
    return (
        run.get("weights"),
        run.get("trained_length"),
        run.get("dtype"),
        run.get("quantization"),
        run.get("attention"),
        run.get("device"),
        run.get("chat_template"),
    )


def _perplexity_key(perplexity: PerplexityRecord | None) -> tuple[object, ...]:
    if not perplexity:
        return ()
    sliding, keys = perplexity.get("sliding"), perplexity.get("key_tokens")
    return (
        perplexity.get("documents"),
        perplexity.get("block"),
        perplexity.get("window"),
        (sliding.get("stride"), sliding.get("lengths")) if sliding else (),
        (keys.get("evaluator"), keys.get("short_context"), keys.get("positions")) if keys else (),
    )


def _merge_pair(first: RunRecord, second: RunRecord) -> RunRecord:
    """Return the first's results with the second's methods; the first wins where both have one."""
    return {
        **first,
        "run": _merge_metadata(first["run"], second["run"]),
        "methods": [
            *first["methods"],
            *(m for m in second["methods"] if m["label"] not in _labels(first)),
        ],
        "perplexity": _merge_perplexity(first.get("perplexity"), second.get("perplexity")),
        "cost": {**(second.get("cost") or {}), **(first.get("cost") or {})},
        "retrieval": _merge_tasks(
            first.get("retrieval") or [], second.get("retrieval") or [], _merge_retrieval
        ),
        "short": _merge_tasks(first.get("short") or [], second.get("short") or [], _merge_short),
        "harness": _merge_tasks(
            first.get("harness") or [], second.get("harness") or [], _merge_harness
        ),
    }


def _merge_metadata(first: RunMetadata, second: RunMetadata) -> RunMetadata:
    commands = [run.get("command") for run in (first, second)]
    return {
        **first,
        "command": "\n".join(filter(None, commands)),
        "not_run": [*(first.get("not_run") or []), *(second.get("not_run") or [])],
        "failed": [*(first.get("failed") or []), *(second.get("failed") or [])],
        # More looks correct p-values by more, which is right for the other run's as well.
        "looks": max((first.get("looks") or [], second.get("looks") or []), key=len),
    }


def _merge_perplexity(
    first: PerplexityRecord | None, second: PerplexityRecord | None
) -> PerplexityRecord | None:
    """Return the losses of both runs' methods; both runs measured the same."""
    if not first or not second:
        return first
    merged: PerplexityRecord = {**first, "losses": {**second["losses"], **first["losses"]}}
    keys, more_keys = first.get("key_tokens"), second.get("key_tokens")
    if keys and more_keys:
        merged["key_tokens"] = {**keys, "losses": {**more_keys["losses"], **keys["losses"]}}
    sliding, more_sliding = first.get("sliding"), second.get("sliding")
    if sliding and more_sliding:
        merged["sliding"] = {
            **sliding,
            "losses": {**more_sliding["losses"], **sliding["losses"]},
        }
    return merged


def _merge_tasks(first: Sequence[T], second: Sequence[T], merge: Callable[[T, T], T]) -> list[T]:
    """Return the records of both runs' tasks; merge those of the same task."""
    others = {entry["task"]: entry for entry in second}
    mine = [
        entry if (other := others.pop(entry["task"], None)) is None else merge(entry, other)
        for entry in first
    ]
    return [*mine, *others.values()]


def _merge_retrieval(first: RetrievalRecord, second: RetrievalRecord) -> RetrievalRecord:
    return {**first, "samples": {**second["samples"], **first["samples"]}}


def _merge_short(first: ShortRecord, second: ShortRecord) -> ShortRecord:
    return {**first, "samples": {**second["samples"], **first["samples"]}}


def _merge_harness(first: HarnessRecord, second: HarnessRecord) -> HarnessRecord:
    return {**first, "metrics": {**second["metrics"], **first["metrics"]}}
