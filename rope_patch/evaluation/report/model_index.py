"""A report's numbers as the evaluation block of model cards, `model-index`, which the hub reads.

`evaluations` returns what was measured under one method, for the card of a model that has it.
`model_index` writes a whole report, an entry for each method, to take one from: a published model
has one rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from huggingface_hub import CardData, EvalResult, ModelCardData

from rope_patch.evaluation.report.conclusions import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import one_line
from rope_patch.statistics import SIGNIFICANCE_LEVEL, Interval

_HEAD = (
    "# An entry for each method. Put that of the method you publish below `model-index:` in the\n"
    "# front matter of README.md.\n"
)
_PRECISION = 4  # digits behind the point
_ACCURACY, _LOSS, _PERPLEXITY = "accuracy", "nats per token", "perplexity"
_LEAST = {_ACCURACY: 0.0, _LOSS: 0.0, _PERPLEXITY: 1.0}  # below which Student's t may reach


def model_index(runs: Sequence[tuple[str, RunStatistics, Ranking]]) -> str:
    """Return the YAML of all methods of all runs, best first; "" where nothing was measured.

    Args:
        runs: Each run's title, statistics and ranking.
    """
    entries: list[dict[str, Any]] = []
    for title, stats, ranking in runs:
        for label in (label for group in ranking.groups for label in group):
            if results := evaluations(stats, label):
                name = f"{title}, {stats.names[label]}"
                entries += ModelCardData(model_name=name, eval_results=results).to_dict()[
                    "model-index"
                ]
    if not entries:
        return ""
    card = CardData()
    card["model-index"] = entries
    return f"{_HEAD}{card.to_yaml()}\n"


def evaluations(stats: RunStatistics, label: str) -> list[EvalResult]:
    """Return what was measured under a method, as the hub's library has it.

    Accuracy of each task, and the mean over tasks, at each length; losses of the right answers and
    perplexities; accuracy at ordinary tasks; the usable length. `metric_args` hold the method, n
    and the interval, where it has bounds.

    Args:
        stats: One run's statistics.
        label: The method's label.
    """
    numbers = [*_answers(stats, label), *_perplexities(stats, label), *_short(stats, label)]
    method = stats.names[label]
    results = [
        _result(dataset, args, kind, interval, method, confidence)
        for dataset, args, kind, interval, confidence in numbers
        if interval is not None and math.isfinite(interval.estimate)
    ]
    usable = stats.usable_length(label)
    if usable is not None and usable.stated is not None:
        tasks = list(stats.averaged_tasks)
        results.append(
            EvalResult(
                **_dataset(", ".join(map(task_name, tasks)), {"tasks": tasks}),
                metric_type="usable_length",
                metric_value=usable.stated,
                metric_name=f"usable length: {usable}",
                metric_args={"method": method},
            )
        )
    return results


# What was measured, its arguments, the metric, its interval and the interval's level.
_Number = tuple[str, dict[str, Any], str, Interval | None, float]
_LEVEL = 1 - SIGNIFICANCE_LEVEL


def _answers(stats: RunStatistics, label: str) -> Iterator[_Number]:
    """Yield accuracies and losses by length."""
    averaged = list(stats.averaged_tasks)
    for length in stats.lengths:
        at = f"at {length:,} tokens"
        for task in stats.tasks:
            accuracy = stats.accuracy(label, task, (length,))
            args = {"task": task, "length": length}
            yield f"{task_name(task)} {at}", args, _ACCURACY, accuracy, _LEVEL
        args = {"tasks": averaged, "length": length}
        if len(averaged) > 1:
            mean = stats.accuracy(label, lengths=(length,))
            yield f"mean of {len(averaged)} tasks {at}", args, _ACCURACY, mean, _LEVEL
        if (loss := stats.answer_loss(label, length)) is not None:
            args = {"tasks": stats.likelihood_tasks, "length": length}
            level = 1 - SIGNIFICANCE_LEVEL / stats.look_factor(length)
            yield f"right answers {at}", args, _LOSS, loss.mean, level


def _perplexities(stats: RunStatistics, label: str) -> Iterator[_Number]:
    """Yield perplexity within and beyond the trained length."""
    names = [one_line(document["name"]) for document in stats.documents]
    for beyond, where in ((False, "up to"), (True, "beyond")):
        args = {"documents": names, where.replace(" ", "_"): stats.trained_length}
        dataset = f"{', '.join(names)} {where} {stats.trained_length:,} tokens"
        yield dataset, args, _PERPLEXITY, stats.average(label, beyond=beyond), _LEVEL


def _short(stats: RunStatistics, label: str) -> Iterator[_Number]:
    """Yield accuracy at ordinary tasks."""
    for task in stats.results.get("short") or []:
        measured = stats.short(task, label)
        name = one_line(task["task"])
        args = {"task": name}
        yield f"{name}, short texts", args, _ACCURACY, measured and measured[0], _LEVEL


def _dataset(name: str, args: dict[str, Any]) -> dict[str, Any]:
    # The hub's library takes results for those of one data set by type and config alone. The type
    # says who made the samples: there is no such data set to link.
    return {
        "task_type": "text-generation",
        "dataset_type": "rope_patch",
        "dataset_name": name,
        "dataset_config": name,
        "dataset_args": args,
    }


def _result(
    dataset: str, args: dict[str, Any], kind: str, interval: Interval, method: str, level: float
) -> EvalResult:
    """Return one number; its bounds only where there are two."""
    count = {"method": method, interval.unit: int(interval.n)}
    name = f"{kind}, n = {interval.n:,g} {interval.unit}"
    low = max(interval.low, min(_LEAST[kind], interval.estimate))
    bounds = [round(float(bound), _PRECISION) for bound in (low, interval.high)]
    if math.isfinite(interval.low) and math.isfinite(interval.high):
        count |= {"low": bounds[0], "high": bounds[1], "confidence": round(level, 6)}
        name += f", {100 * level:.4g}% interval {bounds[0]:g} to {bounds[1]:g}"
    return EvalResult(
        **_dataset(dataset, args),
        metric_type=kind,
        metric_value=round(float(interval.estimate), _PRECISION),
        metric_name=name,
        metric_args=count,
    )
