"""Perplexity as tables: by position, averages, LongPPL, sliding windows, answers."""

from __future__ import annotations

import math
from collections.abc import Callable

from rope_patch.evaluation.report.format import NOTHING, perplexity_text
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
    ratio_cell,
)
from rope_patch.statistics import Interval


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
    """Return how probable the right answers are, as perplexity."""
    rows = []
    columns = length_heads(stats.lengths, stats.trained_length)
    for label in stats.labels:
        losses = [stats.answer_loss(label, length) for length in stats.lengths]
        if any(losses):
            cells = [
                Cell(text=_exp_text(loss.mean.estimate) if loss else NOTHING, beyond=head.beyond)
                for loss, head in zip(losses, columns, strict=True)
            ]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    return Table(
        name="Perplexity of the right answers, mean of all questions' tasks",
        corner="method",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, stats.trained_length),
    )


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


def _exp_text(nll: float) -> str:
    return perplexity_text(math.exp(nll) if nll < 700 else math.inf)


def _by_position(stats: RunStatistics) -> Table:
    curves = {label: stats.curve(label) for label in stats.losses}
    name = "Perplexity of the window that ends at a position"
    return _by_length(stats, name, representative_positions(stats), curves, stats.control)


def _by_length(
    stats: RunStatistics,
    name: str,
    lengths: list[int],
    curves: dict[str, Curve],
    control: Curve | None = None,
) -> Table:
    columns = length_heads(lengths, stats.trained_length)

    def cells(curve: Curve) -> list[Cell]:
        return [
            perplexity_cell(curve.get(length), beyond=head.beyond)
            for length, head in zip(lengths, columns, strict=True)
        ]

    rows = [method_row(stats, label, cells(curve)) for label, curve in curves.items() if curve]
    if control and stats.control_record:
        name_of_control = f"control (last {stats.control_record['context']:,} tokens)"
        rows.append(Row(name=name_of_control, key=CONTROL, cells=cells(control)))
    groups = length_groups(columns, stats.trained_length)
    return Table(name=name, corner="tokens", columns=columns, rows=rows, groups=groups)


def _averages(stats: RunStatistics) -> Table:
    columns: list[Cell] = []
    rows = {label: method_row(stats, label, []) for label in stats.losses}
    for beyond in (False, True):
        averages = {label: stats.average(label, beyond=beyond) for label in rows}
        if not any(averages.values()):
            continue
        columns.append(Cell(text="perplexity", beyond=beyond))
        for label, row in rows.items():
            row.cells.append(perplexity_cell(averages[label], beyond=beyond))
        if stats.plain in rows:
            columns.append(Cell(text="vs plain", beyond=beyond))
            for label, row in rows.items():
                ratio = None if label == stats.plain else _ratio_to_plain(stats, label, beyond)
                row.cells.append(ratio_cell(ratio, beyond=beyond))
        if beyond and stats.control:
            columns.append(Cell(text="vs control", beyond=True))
            for label, row in rows.items():
                row.cells.append(ratio_cell(stats.ratio_to_control(label), beyond=True))
    return Table(
        name="Perplexity averaged over all blocks",
        corner="average",
        columns=columns,
        rows=list(rows.values()),
        groups=length_groups(columns, stats.trained_length),
    )


def _ratio_to_plain(stats: RunStatistics, label: str, beyond: bool) -> Interval | None:
    return None if stats.plain is None else stats.ratio(label, stats.plain, beyond=beyond)


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
