"""The summary: what length is usable, with which method, at what price; sentences and one table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.evaluation.report.cost_tables import size_text, time_ratio_cell
from rope_patch.evaluation.report.results.findings import RunStatistics, task_name
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.table import (
    NOTHING,
    Cell,
    Row,
    Table,
    change_range,
    change_text,
    filter_mark,
    n_text,
    p_text,
    percent,
    percent_range,
    perplexity_range,
    perplexity_text,
    points_range,
    points_text,
    ratio_cell,
)
from rope_patch.statistics import Interval

_MAX_ITEMS = 4  # of a sentence
_GUESSABLE_ACCURACY = 0.05  # accuracy without a needle from which on answers count as guessable


def sentences(found: RunStatistics) -> list[str]:
    """What the results say, each number with its interval and n; the first is the headline."""
    gained = [*_usable_length_sentences(found), *_long_perplexity_sentences(found)]
    told = [
        *gained[:1],
        *_warnings(found),
        *gained[1:],
        *_short_context_sentences(found),
        *_time_memory_sentences(found),
    ]
    return told or ["Nothing was measured."]


def best_method(found: RunStatistics) -> str | None:
    """The patched method that is usable the farthest; the plain model where it is alone."""
    labels = found.patched or found.labels

    def rank(label: str) -> tuple[float, float, float]:
        kept = found.retention(label, found.lengths[-1]) if found.lengths else None
        far = (
            found.accuracy(label, lengths=found.lengths_beyond_training)
            if found.lengths_beyond_training
            else None
        )
        loss = found.average(label, beyond=True)
        return (
            found.effective_length(label)[0] or 0 if found.lengths else 0,
            kept.estimate if kept else far.estimate if far else -1,
            -loss.estimate if loss and not math.isnan(loss.estimate) else -math.inf,
        )

    return max(labels, key=rank) if labels else None


def summary_table(runs: list[tuple[str, RunStatistics]]) -> Table | None:
    """A row for each method, of each run where there are several.

    Args:
        runs: Titles and findings.
    """
    heads = _column_heads(runs)
    rows = [
        Row(
            name=found.names[label],
            key=found.colour_names[label],
            cells=_method_cells(found, label),
            group=title if len(runs) > 1 else "",
            method=filter_mark(label),
        )
        for title, found in runs
        for label in found.labels
    ]
    kept = [i for i in range(len(heads)) if any(row.cells[i].text != NOTHING for row in rows)]
    if not kept:
        return None
    for row in rows:
        row.cells[:] = [row.cells[i] for i in kept]
    return Table(
        name="Each method, with 95% intervals",
        corner="method",
        columns=[heads[i] for i in kept],
        rows=rows,
        groups=[],
    )


def _column_heads(runs: list[tuple[str, RunStatistics]]) -> list[Cell]:
    longest = {found.lengths[-1] for _, found in runs if found.lengths}
    trained = {found.trained_length for _, found in runs}
    at = f"at {longest.pop():,}" if len(longest) == 1 else "at the longest"
    of = f"{trained.pop():,}" if len(trained) == 1 else "the trained length"
    return [
        Cell(text="usable up to", tip=f"retention surely above {THRESHOLD:.0%} up to this length"),
        Cell(text="RULER's 85.6% to"),
        Cell(text=f"retention {at}"),
        Cell(text=f"accuracy beyond {of}"),
        Cell(text=f"perplexity beyond {of}", tip="against the control, else the plain model"),
        Cell(text=f"perplexity up to {of}"),
        Cell(text="short tasks, points"),
        Cell(text="prompt time"),
        Cell(text="peak memory"),
    ]


def _method_cells(found: RunStatistics, label: str) -> list[Cell]:
    cost = (found.results.get("cost") or {}).get(label) or {}
    near = None
    if found.plain is not None and label != found.plain:
        near = found.ratio(label, found.plain, beyond=False)
    return [
        _effective_cell(found, label),
        _ruler_cell(found, label),
        _share_cell(found.retention(label, found.lengths[-1]) if found.lengths else None),
        _share_cell(
            found.accuracy(label, lengths=found.lengths_beyond_training)
            if found.lengths_beyond_training
            else None
        ),
        _far_perplexity_cell(found, label),
        ratio_cell(near),
        _short_cell(found, label),
        time_ratio_cell(cost.get("prompt_ratio")),
        Cell(text=size_text(cost.get("peak_bytes"))),
    ]


def _short_cell(found: RunStatistics, label: str) -> Cell:
    paired = found.short_overall(label)
    if paired is None:
        return Cell(text=NOTHING)
    change = paired.difference
    text, span = points_text(change.estimate), points_range(change)
    tip = f"{text} points against the plain model, {span}, {n_text(change)}"
    return Cell(text=text, note=span, tip=f"{tip}, {p_text(paired.p_value)}")


def _effective_cell(found: RunStatistics, label: str) -> Cell:
    if not found.lengths:
        return Cell(text=NOTHING)
    length, reason = found.effective_length(label)
    text = "none shown" if length is None else f"{length:,}"
    return Cell(text=text, tip=reason, beyond=bool(length and length > found.trained_length))


def _ruler_cell(found: RunStatistics, label: str) -> Cell:
    if not found.has_ruler:
        return Cell(text=NOTHING)
    length, reason = found.ruler_effective_length(label)
    return Cell(text="none shown" if length is None else f"{length:,}", tip=reason)


def _share_cell(interval: Interval | None) -> Cell:
    if interval is None:
        return Cell(text=NOTHING)
    text, span = percent(interval.estimate), percent_range(interval)
    return Cell(text=text, note=span, tip=f"{text}, 95% interval {span}, {n_text(interval)}")


def _far_perplexity_cell(found: RunStatistics, label: str) -> Cell:
    if (held := found.ratio_to_control(label)) is not None:
        return ratio_cell(held)
    if found.plain is None or label == found.plain:
        return Cell(text=NOTHING)
    return ratio_cell(found.ratio(label, found.plain, beyond=True))


def _usable_length_sentences(found: RunStatistics) -> Iterator[str]:
    chosen = best_method(found)
    if not found.tasks or chosen is None:
        return
    trained = f"{found.trained_length:,}"
    if not found.lengths_beyond_training:
        yield f"No retrieval was measured beyond the trained {trained} tokens."
    elif found.plain is None or not found.lengths_within_training:
        far = found.accuracy(chosen, lengths=found.lengths_beyond_training)
        who = found.names[chosen]
        if far is not None:
            yield (
                f"Beyond its trained {trained} tokens the model gets {_share_with_interval(far)} of the answers "
                f"right with {who}; the plain model was not measured within that length, so no "
                f"length is called usable."
            )
    else:
        yield _headline(found, chosen)
        usable, reason = found.effective_length(chosen)
        if usable is not None and usable < found.lengths[-1]:
            yield f"Why not farther: {reason}."
    others = [label for label in found.labels if label != chosen]
    if found.lengths_beyond_training and (
        texts := [t for label in others if (t := _accuracy_phrase(found, label))]
    ):
        yield f"In texts beyond {trained} tokens: {'; '.join(_first_few(texts))}."


def _headline(found: RunStatistics, chosen: str) -> str:
    """The sentence that everything is about."""
    among = f", the best of {len(found.patched)} methods," if len(found.patched) > 1 else ""
    who = f"With {found.names[chosen]}{among} the model"
    if chosen == found.plain:
        who = "Without a method, the model"
    usable, reason = found.effective_length(chosen)
    if usable is not None and usable > found.trained_length:
        kept = found.retention(chosen, usable)
        times = f"{usable / found.trained_length:.3g}"
        text = f"{who} is usable up to {usable:,} tokens, {times} times its trained "
        text += f"{found.trained_length:,}"
        if kept is not None:
            text += f": it keeps {_share_with_95_interval(kept)} of the plain model's accuracy"
        return f"{text}."
    first = next(
        (n for n in found.lengths_beyond_training if found.retention(chosen, n) is not None), None
    )
    kept = None if first is None else found.retention(chosen, first)
    if kept is None:
        return f"No length is shown to be usable: {reason}."
    text = (
        f"{who} is not shown to be usable beyond its trained {found.trained_length:,} tokens: at "
    )
    text += f"{first:,} it keeps {_share_with_95_interval(kept)} of the plain model's accuracy"
    if kept.high >= THRESHOLD:
        text += f"; n is too small to tell whether that is above {THRESHOLD:.0%}"
    return f"{text}."


def _accuracy_phrase(found: RunStatistics, label: str) -> str:
    far = found.accuracy(label, lengths=found.lengths_beyond_training)
    if far is None:
        return ""
    name = "the plain model" if label == found.plain else found.names[label]
    return f"{name} gets {_share_with_interval(far)} right"


def _long_perplexity_sentences(found: RunStatistics) -> Iterator[str]:
    """Perplexity where the plain model was not trained."""
    if not found.losses:
        return
    trained = f"{found.trained_length:,}"
    averages = {label: found.average(label, beyond=True) for label in found.losses}
    known = {label: interval for label, interval in averages.items() if interval is not None}
    if not known:
        yield f"No perplexity was measured beyond the trained {trained} tokens."
        return
    texts = [
        f"{_perplexity_with_interval(known[label])} {_method_phrase(found, label)}"
        for label in known
    ]
    yield f"Beyond its trained {trained} tokens the model's perplexity is {_join_words(texts)}."
    changes = {label: found.ratio_to_control(label) for label in known}
    texts = [
        f"{_change_with_interval(change)} {_method_phrase(found, label)}"
        for label, change in changes.items()
        if change is not None and math.isfinite(change.estimate)
    ]
    if texts:
        context = f"{found.perplexity['control']['context']:,}"
        control = f"the control, which reads only the last {context} tokens"
        yield f"Against {control}, it is {_join_words(texts)}."


def _method_phrase(found: RunStatistics, label: str) -> str:
    return "without a patch" if label == found.plain else f"with {found.names[label]}"


def _join_words(texts: list[str]) -> str:
    if len(texts) > _MAX_ITEMS:
        *some, rest = _first_few(texts)
        return f"{', '.join(some)}; {rest}"
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _first_few(texts: list[str]) -> list[str]:
    """The first ones, and that there are more."""
    left = len(texts) - _MAX_ITEMS
    return [*texts[:_MAX_ITEMS], f"the tables show {left} more"] if left > 0 else texts


def _short_context_sentences(found: RunStatistics) -> Iterator[str]:
    """What methods cost where the plain model needs no help."""
    if found.plain is None:
        return
    for label in found.patched[:4]:
        parts = []
        change = found.ratio(label, found.plain, beyond=False)
        if change is not None and math.isfinite(change.estimate):
            parts.append(f"perplexity by {_change_with_interval(change)}")
        if (short := found.short_overall(label)) is not None:
            interval, p = short.difference, short.p_value
            parts.append(
                f"accuracy at ordinary tasks by {points_text(interval.estimate)} points "
                f"({points_range(interval)}, {n_text(interval)}, {p_text(p)})"
            )
        if parts:
            place = f"Up to {found.trained_length:,} tokens"
            yield f"{place} {found.names[label]} changes {' and '.join(parts)}."


def _time_memory_sentences(found: RunStatistics) -> Iterator[str]:
    """Time and memory of the best method."""
    chosen, costs = best_method(found), found.results.get("cost") or {}
    cost = costs.get(chosen) if chosen else None
    if not cost or chosen is None:
        return
    first = next(label for label in found.labels if costs.get(label))
    base = "the plain model's" if first == found.plain else f"that of {found.names[first]}"
    parts = []
    if chosen != first:
        for key, what in (("prompt_ratio", "reading a prompt"), ("token_ratio", "writing a token")):
            if ratio := cost.get(key):
                low, middle, high = (float(value) for value in ratio)
                parts.append(f"{what} takes ×{middle:.2f} ({low:.2f}–{high:.2f}) of {base} time")
    if cost.get("peak_bytes"):
        tokens = cost.get("prompt_tokens")
        at = f" for {tokens:,} tokens" if tokens else ""
        parts.append(f"memory peaks at {size_text(cost['peak_bytes'])}{at}")
    if parts:
        yield f"With {found.names[chosen]} {', '.join(parts)}."


def _warnings(found: RunStatistics) -> Iterator[str]:
    """What makes the rest doubtful, said before it."""
    for task, length, accuracy, chance in found.controls:
        if accuracy.low > chance if chance else accuracy.estimate > _GUESSABLE_ACCURACY:
            yield (
                f"Careful: {task_name(task)} can be answered without its needle, {_share_with_interval(accuracy)}"
                f" at {length:,} tokens; its scores do not show retrieval."
            )
    if count := len(found.failures):
        yield f"{count} sample{'s' if count > 1 else ''} failed and count in no number here."


def _share_with_interval(interval: Interval) -> str:
    return f"{percent(interval.estimate)} ({percent_range(interval)}, {n_text(interval)})"


def _share_with_95_interval(interval: Interval) -> str:
    text = f"95% interval {percent_range(interval)}, {n_text(interval)}"
    return f"{percent(interval.estimate)} ({text})"


def _perplexity_with_interval(interval: Interval) -> str:
    return _with_interval(perplexity_text(interval.estimate), perplexity_range(interval), interval)


def _change_with_interval(interval: Interval) -> str:
    return _with_interval(change_text(interval.estimate), change_range(interval), interval)


def _with_interval(text: str, span: str, interval: Interval) -> str:
    return f"{text} ({span}, {n_text(interval)})" if span else f"{text} ({n_text(interval)})"
