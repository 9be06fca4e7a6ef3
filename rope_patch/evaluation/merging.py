"""Merging runs that measured the same samples on the same weights into one with all methods."""

from __future__ import annotations

from typing import Any

Results = dict[str, Any]


def merge_runs(runs: list[Results]) -> list[Results]:
    """Merge runs whose methods compare sample by sample; leave the others as they are.

    Args:
        runs: Results of evaluations.

    Returns:
        Fewer or as many results, in the order of the first of each.
    """
    merged: list[Results] = []
    for run in runs:
        same = (i for i, other in enumerate(merged) if _comparable(other, run))
        if (i := next(same, None)) is None:
            merged.append(run)
        else:
            merged[i] = _merge_pair(merged[i], run)
    return merged


def _comparable(first: Results, second: Results) -> bool:
    """Return whether the runs differ in methods alone, and share none but the plain model."""
    shared = _labels(first) & _labels(second)
    plain = {m["label"] for m in first["methods"] if m.get("method") is None}
    has_weights = first["run"].get("weights") is not None
    return has_weights and shared <= plain and _comparison_key(first) == _comparison_key(second)


def _labels(run: Results) -> set[str]:
    return {method["label"] for method in run["methods"]}


def _comparison_key(run: Results) -> Any:
    """Return what methods must have in common to be compared: weights, texts, tokens, samples."""
    metadata, perplexity = run["run"], run.get("perplexity") or {}
    sliding, key_tokens = (perplexity.get(part) or {} for part in ("sliding", "key_tokens"))
    return (
        [
            metadata.get(key)
            for key in ("weights", "trained_length", "dtype", "attention", "device")
        ],
        [perplexity.get(key) for key in ("documents", "block", "window")],
        [sliding.get(key) for key in ("stride", "lengths")],
        [key_tokens.get(key) for key in ("evaluator", "short_context", "positions")],
        {
            entry["task"]: {s["id"] for rows in entry["samples"].values() for s in rows}
            for entry in run.get("retrieval") or []
        },
        {task["task"]: task["n"] for task in run.get("short") or []},
        # Costs are ratios to the first method that was measured.
        next(iter(run.get("cost") or {}), None),
    )


def _merge_pair(first: Results, second: Results) -> Results:
    """Return the first's results with the second's methods; the first wins where both have one."""
    methods = [m for m in second["methods"] if m["label"] not in _labels(first)]
    commands = [run["run"].get("command") for run in (first, second)]
    perplexity = first.get("perplexity")
    if perplexity:
        perplexity = {**perplexity, "losses": _merge_dicts(first, second, "perplexity", "losses")}
        for part in ("sliding", "key_tokens"):
            if perplexity.get(part):
                losses = _merge_dicts(first["perplexity"], second["perplexity"], part, "losses")
                perplexity[part] = {**perplexity[part], "losses": losses}
    notes = {
        name: [*(first["run"].get(name) or []), *(second["run"].get(name) or [])]
        for name in ("not_run", "failed")
    }
    joined = {
        "run": {**first["run"], "command": "\n".join(filter(None, commands)), **notes},
        "methods": [*first["methods"], *methods],
        "perplexity": perplexity,
        "cost": {**(second.get("cost") or {}), **(first.get("cost") or {})},
    }
    for part, what in (("retrieval", "samples"), ("short", "samples"), ("harness", "metrics")):
        joined[part] = _merge_entries(first.get(part) or [], second.get(part) or [], what)
    return {**first, **joined}


def _merge_dicts(first: Results, second: Results, part: str, what: str) -> Results:
    return {**(second.get(part) or {}).get(what, {}), **first[part][what]}


def _merge_entries(first: list[Results], second: list[Results], what: str) -> list[Results]:
    """Return entries of tasks, each with both runs' methods."""
    others = {entry["task"]: entry for entry in second}
    mine = [
        {**entry, what: {**others.pop(entry["task"], {}).get(what, {}), **entry[what]}}
        for entry in first
    ]
    return [*mine, *others.values()]
