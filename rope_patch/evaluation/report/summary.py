"""The summary: the usable length, by which method, at what cost, in sentences with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.evaluation.report.cost_tables import short_p_text, size_text
from rope_patch.evaluation.report.format import (
    change_range,
    change_text,
    n_text,
    percent,
    percent_range,
    perplexity_range,
    perplexity_text,
    points_range,
    points_text,
)
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.retrieval_tables import can_tell, is_informative
from rope_patch.evaluation.report.table import is_unknown
from rope_patch.evaluation.report.verdict import likelihood_sentences
from rope_patch.statistics import Interval

_MAX_ITEMS = 4  # of a sentence
_GUESSABLE_ACCURACY = 0.05  # accuracy without a needle from which on answers count as guessable


def summary_sentences(stats: RunStatistics, ranking: Ranking | None = None) -> list[str]:
    """Return what the results say in detail, each number with its interval and n.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
    """
    ranking = ranking or Ranking(stats)
    chosen = ranking.best
    by_likelihood = list(likelihood_sentences(stats, ranking))
    by_accuracy = list(_usable_length_sentences(stats, ranking))
    # Few answers decide by how likely they are before they do by how many are right.
    is_usable = chosen is not None and _is_usable_beyond(stats, chosen)
    retrieved = [*by_accuracy[:1], *by_likelihood, *by_accuracy[1:]]
    if by_likelihood and not is_usable:
        retrieved = [*by_likelihood, *by_accuracy]
    lines = [
        *retrieved,
        *_long_perplexity_sentences(stats, ranking),
        *_short_context_sentences(stats, ranking),
        *_time_memory_sentences(stats, chosen),
    ]
    return lines or ["Nothing was measured."]


def _usable_length_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    chosen = ranking.best
    if not stats.tasks or chosen is None:
        return
    trained = f"{stats.trained_length:,}"
    if not stats.lengths_beyond_training:
        yield f"No retrieval was measured beyond the trained {trained} tokens."
        return
    if stats.plain is None or not stats.lengths_within_training:
        far = stats.accuracy(chosen, lengths=stats.lengths_beyond_training)
        who = stats.names[chosen]
        if far is not None:
            yield (
                f"Beyond its trained {trained} tokens the model gets "
                f"{_share_with_interval(far)} of the answers right with {who}; the plain model "
                "was not measured within that length, so no length is called usable."
            )
    else:
        yield _usable_length(stats, ranking, chosen)
        usable, reason = stats.effective_length(chosen)
        if usable is not None and usable < stats.lengths[-1]:
            yield f"Why not farther: {reason}."
    others = [labels[0] for labels in ranking.groups if labels[0] != chosen]
    shares = {
        label: share
        for label in others
        if (share := stats.accuracy(label, lengths=stats.lengths_beyond_training)) is not None
    }
    # Likelihoods decide where accuracies could be anything.
    if shares and (not stats.verdict_length or any(map(is_informative, shares.values()))):
        texts = [
            f"{'the plain model' if label == stats.plain else stats.names[label]} gets "
            f"{_share_with_interval(share)} right"
            for label, share in shares.items()
        ]
        yield f"In texts beyond {trained} tokens: {'; '.join(_first_few(texts))}."


def _is_usable_beyond(stats: RunStatistics, label: str) -> bool:
    usable = stats.effective_length(label)[0] if stats.lengths else None
    return usable is not None and usable > stats.trained_length


def _usable_length(stats: RunStatistics, ranking: Ranking, chosen: str) -> str:
    """Return how far the best method is usable."""
    is_best = chosen in ranking.shown_best
    among = f", the best of {len(stats.patched)} methods," if is_best else ""
    who = f"With {stats.names[chosen]}{among} the model"
    if chosen == stats.plain:
        who = "Without a method, the model"
    usable, reason = stats.effective_length(chosen)
    if usable is not None and usable > stats.trained_length:
        retention = stats.retention(chosen, usable)
        times = f"{usable / stats.trained_length:.3g}"
        text = f"{who} is usable up to {usable:,} tokens, {times} times its trained "
        text += f"{stats.trained_length:,}"
        if retention is not None:
            text += f": it keeps {_share_with_95_interval(retention)} of the plain model's accuracy"
        return f"{text}."
    first = next(
        (n for n in stats.lengths_beyond_training if stats.retention(chosen, n) is not None), None
    )
    retention = None if first is None else stats.retention(chosen, first)
    if retention is None:
        return f"No length is shown to be usable: {reason}."
    text = f"{who} is not shown to be usable beyond its trained {stats.trained_length:,} tokens: "
    if not can_tell(retention):
        return (
            f"{text}n at {first:,} ({n_text(retention)}) is too small to tell how much of the "
            "plain model's accuracy it keeps."
        )
    text += (
        f"at {first:,} it keeps {_share_with_95_interval(retention)} of the plain model's accuracy"
    )
    if retention.high >= THRESHOLD:
        text += f"; n is too small to tell whether that is above {THRESHOLD:.0%}"
    return f"{text}."


def _long_perplexity_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    """Yield sentences on perplexity beyond the trained length."""
    if not stats.losses:
        return
    trained = f"{stats.trained_length:,}"
    labels = [labels[0] for labels in ranking.groups if labels[0] in stats.losses]
    averages = {label: stats.average(label, beyond=True) for label in labels}
    measured = {label: interval for label, interval in averages.items() if interval is not None}
    if not measured:
        yield f"No perplexity was measured beyond the trained {trained} tokens."
        return
    texts = [
        f"{_perplexity_with_interval(measured[label])} {_method_phrase(stats, label)}"
        for label in measured
    ]
    yield f"Beyond its trained {trained} tokens the model's perplexity is {_join_words(texts)}."
    changes = {label: stats.ratio_to_control(label) for label in measured}
    texts = [
        f"{_change_with_interval(change)} {_method_phrase(stats, label)}"
        for label, change in changes.items()
        if change is not None and math.isfinite(change.estimate) and not is_unknown(change)
    ]
    if texts and stats.control_record:
        context = f"{stats.control_record['context']:,}"
        control = f"the control, which reads only the last {context} tokens"
        yield f"Against {control}, it is {_join_words(texts)}."


def _method_phrase(stats: RunStatistics, label: str) -> str:
    return "without a patch" if label == stats.plain else f"with {stats.names[label]}"


def _join_words(texts: list[str]) -> str:
    if len(texts) > _MAX_ITEMS:
        *some, rest = _first_few(texts)
        return f"{', '.join(some)}; {rest}"
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _first_few(texts: list[str]) -> list[str]:
    """Return the first texts, and how many more there are."""
    left = len(texts) - _MAX_ITEMS
    return [*texts[:_MAX_ITEMS], f"the tables show {left} more"] if left > 0 else texts


def _short_context_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    """Yield sentences on what methods cost within the trained length."""
    if stats.plain is None:
        return
    patched = [labels[0] for labels in ranking.groups if labels[0] != stats.plain]
    for label in patched[:_MAX_ITEMS]:
        parts = []
        change = stats.ratio(label, stats.plain, beyond=False)
        if change is not None and math.isfinite(change.estimate):
            parts.append(f"perplexity by {_change_with_interval(change)}")
        if (short := stats.short_overall(label)) is not None:
            interval = short.difference
            parts.append(
                f"accuracy at ordinary tasks by {points_text(interval.estimate)} points "
                f"({points_range(interval)}, {n_text(interval)}, {short_p_text(stats, label)})"
            )
        if parts:
            place = f"Up to {stats.trained_length:,} tokens"
            yield f"{place} {stats.names[label]} changes {' and '.join(parts)}."


def _time_memory_sentences(stats: RunStatistics, chosen: str | None) -> Iterator[str]:
    """Yield a sentence on time and memory of the best method."""
    costs = stats.results.get("cost") or {}
    cost = costs.get(chosen) if chosen else None
    if not cost or chosen is None:
        return
    first = next(label for label in stats.labels if costs.get(label))
    base = "the plain model's" if first == stats.plain else f"that of {stats.names[first]}"
    parts = []
    if chosen != first:
        for ratio, what in (
            (cost.get("prompt_ratio"), "reading a prompt"),
            (cost.get("token_ratio"), "writing a token"),
        ):
            if ratio:
                low, middle, high = (float(value) for value in ratio)
                parts.append(f"{what} takes ×{middle:.2f} ({low:.2f}–{high:.2f}) of {base} time")
    if cost.get("peak_bytes"):
        tokens = cost.get("prompt_tokens")
        at = f" for {tokens:,} tokens" if tokens else ""
        size = size_text(cost["peak_bytes"])
        parts.append(f"the cache and one decoding step take {size}{at}, beside the weights")
    if parts:
        yield f"With {stats.names[chosen]} {', '.join(parts)}."


def summary_warnings(stats: RunStatistics) -> Iterator[str]:
    """Yield warnings about results that are in doubt."""
    for task, length, accuracy, chance in stats.controls:
        if accuracy.low > chance if chance else accuracy.estimate > _GUESSABLE_ACCURACY:
            yield (
                f"Careful: {task_name(task)} can be answered without its needle, "
                f"{_share_with_interval(accuracy)} at {length:,} tokens; its scores do not show "
                "retrieval."
            )
    if count := len(stats.failures):
        yield f"{count} sample{'s' if count > 1 else ''} failed and count in no number here."


def _share_with_interval(interval: Interval) -> str:
    return f"{percent(interval.estimate)} ({percent_range(interval)}, {n_text(interval)})"


def _share_with_95_interval(interval: Interval) -> str:
    text = f"95% interval {percent_range(interval)}, {n_text(interval)}"
    return f"{percent(interval.estimate)} ({text})"


def _perplexity_with_interval(interval: Interval) -> str:
    return _with_interval(perplexity_text(interval.estimate), perplexity_range(interval), interval)


def _change_with_interval(interval: Interval) -> str:
    return _with_interval(change_text(interval), change_range(interval), interval)


def _with_interval(text: str, span: str, interval: Interval) -> str:
    return f"{text} ({span}, {n_text(interval)})" if span else f"{text} ({n_text(interval)})"
