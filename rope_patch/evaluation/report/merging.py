"""Merging runs that measured the same samples on the same weights into one with all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from rope_patch.evaluation.request import SERVED
from rope_patch.evaluation.results_schema import (
    HarnessRecord,
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


def add_other_weights(run: RunRecord, other: RunRecord, labels: Mapping[str, str]) -> RunRecord:
    """Return a run with the methods of another run, of other weights, under labels of their own.

    The samples must be the same, so that the methods compare sample by sample, as those of a
    model before and after training do, or of two servers. What a server's model computes in (dtype,
    quantisation, device) is not compared, because servers do not say.

    Args:
        run: The run to add to.
        other: The run on other weights, or of a server.
        labels: The new label of each of its methods.

    Raises:
        ValueError: The runs asked different samples, or a new label is taken.
    """
    if taken := sorted(_labels(run) & set(labels.values())):
        raise ValueError(f"{taken[0]!r} is the label of a method already: expected a new one")
    is_served = any("server" in each["run"] for each in (run, other))
    # The weights differ by purpose, and times are those of another run.
    mine, theirs = (
        (
            {name: each["run"].get(name) for name in (_SERVED_KEYS if is_served else _MODEL_KEYS)},
            *_comparison_key(each)[1:4],
        )
        for each in (run, other)
    )
    names = ("model", "documents", "questions", "short tasks")
    differences = [name for name, a, b in zip(names, mine, theirs, strict=True) if a != b]
    if not differences and not _has_same_prompts(run, other):
        differences = [
            "prompts (other texts, a chat template with a clock, or results of an older version in "
            "a chat template, which do not say what was asked: evaluate those again)"
        ]
    if differences:
        raise ValueError(
            f"the runs differ in {', '.join(differences)}: expected the same questions, to compare "
            "one by one"
        )
    renamed: RunRecord = relabelled(other, labels)
    return _merge_pair(run, {**renamed, "cost": {}})


def add_served_run(run: RunRecord, other: RunRecord, label: str) -> RunRecord:
    """Return a run with what a server answered to the same samples, under a label of its own.

    Args:
        run: The run to add to, of a model in this process.
        other: The run of one server.
        label: The server's label.

    Raises:
        ValueError: The other run is not that of one server, or `add_other_weights` refuses it.
    """
    if "server" not in other["run"] or "servers" in other["run"]:
        raise ValueError("it is not the evaluation of one server: expected that of `eval URL`")
    if "server" in run["run"]:
        raise ValueError(
            "the other run is of a server, too: expected a model in this process; `rope-patch "
            "compare URL_A URL_B` compares two servers"
        )
    both = add_other_weights(run, other, {SERVED: label})
    for method in both["methods"]:
        if method["label"] == label:
            method["method"] = SERVED  # None is the plain model
    servers = {**run["run"].get("servers", {}), label: other["run"]["server"]}
    return {**both, "run": {**both["run"], "servers": servers}}


def relabelled(value: Any, labels: Mapping[str, str]) -> Any:
    """Return results with other labels, which are keys of mappings and `label` of methods.

    Args:
        value: Results, or a part of them.
        labels: New labels by old ones.
    """
    if isinstance(value, dict):
        renamed = {labels.get(key, key): relabelled(item, labels) for key, item in value.items()}
        if isinstance(label := value.get("label"), str) and label in labels:
            renamed["label"] = labels[label]
        return renamed
    if isinstance(value, list | tuple):
        return [relabelled(item, labels) for item in value]
    return value


def _comparable(first: RunRecord, second: RunRecord) -> bool:
    """Return whether the runs differ in methods alone, and share none but the plain model."""
    shared = _labels(first) & _labels(second)
    plain = {m["label"] for m in first["methods"] if m.get("method") is None}
    has_weights = first["run"].get("weights") is not None
    return (
        has_weights
        and shared <= plain
        and _comparison_key(first) == _comparison_key(second)
        and _has_same_prompts(first, second)
    )


def _has_same_prompts(first: RunRecord, second: RunRecord) -> bool:
    """Return whether questions of the same name in two runs are known to have the same prompts."""
    mine, theirs = _prompts(first), _prompts(second)
    # Without a chat template, a question's name determines its prompt in older results.
    in_chat = first["run"].get("chat_template") is not None
    return all(
        mine[name] == theirs[name] and not (in_chat and mine[name] is None)
        for name in mine.keys() & theirs.keys()
    )


def _prompts(run: RunRecord) -> dict[tuple[str, str], object]:
    """Return the digest of each question's prompt, None where an older version kept none."""
    retrieval: dict[tuple[str, str], object] = {
        (entry["task"], sample["id"]): sample.get("prompt")
        for entry in run.get("retrieval") or []
        for samples in entry["samples"].values()
        for sample in samples
    }
    # The questions of one of lm-eval's own tasks have one digest together.
    harness = {
        (entry["task"], ""): next(iter(metrics.values())).get("prompts")
        for entry in run.get("harness") or []
        for metrics in entry["metrics"].values()
        if metrics
    }
    return retrieval | harness


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


_SERVED_KEYS = ("trained_length", "chat_template")
_MODEL_KEYS = ("dtype", "quantization", "attention", "device", *_SERVED_KEYS)


def _model_key(run: RunMetadata) -> tuple[object, ...]:
    return tuple(run.get(name) for name in ("weights", *_MODEL_KEYS))


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
