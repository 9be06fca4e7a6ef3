"""Perplexity as tables: by position, averages, LongPPL, sliding windows, answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rope_patch.evaluation.report.format import (
    NOTHING,
    nats_range,
    nats_text,
    perplexity_text,
)
from rope_patch.evaluation.report.method_row import method_row
from rope_patch.evaluation.report.results.perplexity import Curve
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import (
    CONTROL,
    Cell,
    Row,
    Table,
    length_groups,
    length_heads,
    perplexity_cell,
    ratio_column,
)
from rope_patch.statistics import ClusteredMean, Interval


def tables(stats: RunStatistics) -> list[Table]:
    """Return the tables of perplexity over whole documents."""
    if not stats.losses:
        return []
    return [_by_position(stats), _averages(stats)]


def key_token_table(stats: RunStatistics) -> Table | None:
    """Return LongPPL within and beyond the trained length."""
    return _within_and_beyond(
        stats,
        "LongPPL: perplexity of the tokens that need far context",
        lambda label, beyond: stats.key_tokens(label, beyond=beyond),
    )


def sliding_table(stats: RunStatistics) -> Table | None:
    """Return perplexity of the same tokens by the length of context before them."""
    curves = {label: stats.sliding(label) for label in stats.labels}
    if not any(curves.values()):
        return None
    lengths = stats.sliding_lengths
    return _by_length(stats, "Perplexity by length of context, sliding", lengths, curves)


def answer_table(stats: RunStatistics) -> Table | None:
    """Return how likely the right answers are, with the floor: the same without them in the text.

    The floor stands at the length where it was measured, which is the shortest.
    """
    rows = []
    columns = length_heads(stats.lengths, stats.trained_length)
    for label in stats.labels:
        losses = [stats.answer_loss(label, length) for length in stats.lengths]
        if any(losses):
            cells = [
                _loss_cell(loss, beyond=head.beyond)
                for loss, head in zip(losses, columns, strict=True)
            ]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    if stats.floor is not None:
        cells = [_loss_cell(None, beyond=head.beyond) for head in columns]
        cells[0] = _loss_cell(stats.floor, beyond=columns[0].beyond)
        rows.append(Row(name="answer not in the text", key=CONTROL, cells=cells))
    return Table(
        name="Loss of the right answers (nats a token), mean of all questions' tasks",
        corner="method",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, stats.trained_length),
    )


def controls(stats: RunStatistics) -> list[tuple[str, Curve]]:
    """Return the controls of perplexity, each with its name; the first is what is compared with."""
    measured = (
        (stats.control_record, stats.control),
        (stats.short_control_record, stats.short_control),
    )
    return [(f"text cut to {r['context']:,}", curve) for r, curve in measured if r and curve]


def representative_positions(stats: RunStatistics) -> list[int]:
    """Return positions that every method has: around the trained length and on to the end."""
    curves = [set(stats.curve(label)) for label in stats.losses]
    ends = sorted(set.intersection(*curves) or set.union(*curves))
    far = [end for end in ends if end > stats.trained_length]
    targets = [ends[-1] * k / 4 for k in range(1, 5)]
    if far:  # quarters of the way from the trained length to the last position
        step = (far[-1] - stats.trained_length) / 4
        targets = [stats.trained_length / 2, stats.trained_length]
        targets += [stats.trained_length + step * k for k in range(1, 5)]
    return sorted({min(ends, key=lambda end: abs(end - target)) for target in targets})


def _loss_cell(loss: ClusteredMean | None, *, beyond: bool) -> Cell:
    if loss is None:
        return Cell(text=NOTHING, tip="not measured", beyond=beyond)
    text, span = nats_text(loss.mean.estimate), nats_range(loss.mean)
    token = perplexity_text(math.exp(min(loss.mean.estimate, 700)))
    tip = f"{text} nats a token (perplexity {token}), 95% interval {span or 'unknown'}"
    tip += f", n = {loss.mean.n:,.0f}, {loss.mean.effective_n:,.0f} texts"
    return Cell(text=text, note=span, tip=tip, beyond=beyond)


def _by_position(stats: RunStatistics) -> Table:
    curves = {label: stats.curve(label) for label in stats.losses}
    name = "Perplexity of the window that ends at a position"
    return _by_length(stats, name, representative_positions(stats), curves, controls(stats))


def _by_length(
    stats: RunStatistics,
    name: str,
    lengths: list[int],
    curves: dict[str, Curve],
    controls: Sequence[tuple[str, Curve]] = (),
) -> Table:
    columns = length_heads(lengths, stats.trained_length)

    def cells(curve: Curve) -> list[Cell]:
        return [
            perplexity_cell(curve.get(length), beyond=head.beyond)
            for length, head in zip(lengths, columns, strict=True)
        ]

    rows = [method_row(stats, label, cells(curve)) for label, curve in curves.items() if curve]
    rows += [Row(name=label, key=CONTROL, cells=cells(curve)) for label, curve in controls]
    groups = length_groups(columns, stats.trained_length)
    return Table(name=name, corner="tokens", columns=columns, rows=rows, groups=groups)


def _averages(stats: RunStatistics) -> Table:
    labels = list(stats.losses)
    columns: list[tuple[Cell, list[Cell]]] = []
    for beyond in (False, True):
        averages = [stats.average(label, beyond=beyond) for label in labels]
        if not any(averages):
            continue
        cells = [perplexity_cell(average, beyond=beyond) for average in averages]
        columns.append((Cell(text="perplexity", beyond=beyond), cells))
        if stats.plain in labels:
            ratios = [_ratio_to_plain(stats, label, beyond) for label in labels]
            columns.append(ratio_column(ratios, "", "the plain model", beyond=beyond))
        if beyond and (names := controls(stats)):
            ratios = [stats.ratio_to_control(label) for label in labels]
            columns.append(ratio_column(ratios, "", f"the {names[0][0]}", beyond=True))
    return Table(
        name="Perplexity averaged over all blocks",
        corner="method",
        columns=[head for head, _ in columns],
        rows=[
            method_row(stats, label, [cells[i] for _, cells in columns])
            for i, label in enumerate(labels)
        ],
        groups=length_groups([head for head, _ in columns], stats.trained_length),
    )


def _ratio_to_plain(stats: RunStatistics, label: str, beyond: bool) -> Interval | None:
    if stats.plain is None or label == stats.plain:
        return None
    return stats.ratio(label, stats.plain, beyond=beyond)


def _within_and_beyond(
    stats: RunStatistics, name: str, measure: Callable[[str, bool], Interval | None]
) -> Table | None:
    measured = {
        label: [measure(label, beyond) for beyond in (False, True)] for label in stats.labels
    }
    columns = [Cell(text="perplexity"), Cell(text="perplexity", beyond=True)]
    rows = [
        method_row(
            stats,
            label,
            [perplexity_cell(v, beyond=c.beyond) for v, c in zip(values, columns, strict=True)],
        )
        for label, values in measured.items()
        if any(values)
    ]
    if not rows:
        return None
    groups = length_groups(columns, stats.trained_length)
    return Table(name=name, corner="method", columns=columns, rows=rows, groups=groups)
