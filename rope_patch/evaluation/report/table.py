"""Tables for HTML, Markdown and terminals alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.evaluation.report.format import (
    NOTHING,
    change_range,
    change_text,
    in_percent,
    n_text,
    perplexity_range,
    perplexity_text,
)
from rope_patch.statistics import Interval
from rope_patch.utils.plain_text import align

# Names of colours, next to m0, m1, ... for the methods.
PLAIN = "plain"
CONTROL = "control"

# The figures have this many colours; further methods start again with another dash.
COLOURS = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell, or one column's head."""

    text: str
    note: str = ""  # a second, quieter line
    tip: str = ""  # the whole story, on hovering
    beyond: bool = False  # of a position or length that the model was not trained on
    share: float | None = None  # what a heat map colours, 0 to 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row; `key` names the colour that its method has in the figures.

    Rows with the same `group` follow that head. Filters select rows by `task` and by the marks in
    `method`, which spaces separate. `folded` rows wait behind a fold; `best` marks the best method.
    """

    name: str
    cells: list[Cell]
    key: str = ""
    group: str = ""
    method: str = ""
    task: str = ""
    folded: bool = False
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; `groups` are the heads above the columns, each with how many of them it spans."""

    name: str
    corner: str
    columns: list[Cell]
    rows: list[Row]
    groups: list[tuple[Cell, int]]
    key: str = ""
    method: str = ""
    task: str = ""

    @property
    def shown(self) -> list[Row]:
        """Return the rows before the fold."""
        return [row for row in self.rows if not row.folded]

    @property
    def folded(self) -> list[Row]:
        """Return the rows behind the fold."""
        return [row for row in self.rows if row.folded]


def aligned_text(table: Table) -> str:
    """Return a table as aligned lines of text, below its name."""
    heads = [group.text for group, span in table.groups for _ in range(span)]
    lines = [[table.corner, *map(_cell_text, table.columns)]]
    if heads:
        lines.insert(0, ["", *heads])
    for row in table.rows:
        name = f"{row.group}, {row.name}" if row.group else row.name
        lines.append([name, *map(_cell_text, row.cells)])
    aligned = [f"  {line}" for line in align(lines)]
    return "\n".join([table.name, *aligned])


def _cell_text(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def perplexity_cell(interval: Interval | None, *, beyond: bool = False) -> Cell:
    """Return a perplexity with its interval."""
    if interval is None:
        return Cell(text=NOTHING, tip="not measured", beyond=beyond)
    text, span = perplexity_text(interval.estimate), perplexity_range(interval)
    tip = f"perplexity {text}, 95% interval {span or 'unknown'}, {n_text(interval)}"
    return Cell(text=text, note=span, tip=tip, beyond=beyond)


def ratio_cell(
    interval: Interval | None, *, beyond: bool = False, percent: bool | None = None
) -> Cell:
    """Return a ratio of perplexities with its interval.

    Args:
        interval: The ratio.
        beyond: Whether it is of texts beyond the trained length.
        percent: The column's unit, which its head names: percent or times. The cell names its own
            unit if None.
    """
    if interval is None:
        return Cell(text=NOTHING, beyond=beyond)
    tip = f"{change_text(interval)}, 95% interval {change_range(interval) or 'unknown'}, paired"
    unit = percent is None
    text = change_text(interval, percent=percent, unit=unit)
    span = change_range(interval, percent=percent, unit=unit)
    # Where nothing can be said of the interval, that is what must be said.
    note = span or "no interval"
    return Cell(text=text, note=note, tip=f"{tip}, {n_text(interval)}", beyond=beyond)


def is_unknown(ratio: Interval | None) -> bool:
    """Return whether a ratio may be far above 1 or far below it, as one of few windows may."""
    return ratio is not None and ratio.low < 1 < ratio.high and ratio.high > 10 * ratio.low


def ratio_column(
    intervals: Sequence[Interval | None], head: str, base: str, *, beyond: bool = False
) -> tuple[Cell, list[Cell]]:
    """Return a column of ratios in one unit, which its head names: percent, or times.

    Args:
        intervals: The ratios; one of which nothing is known is left out.
        head: What is compared; empty where the column beside it says so.
        base: What it is compared with, such as "the plain model".
        beyond: Whether it is of texts beyond the trained length.
    """
    intervals = [None if is_unknown(interval) else interval for interval in intervals]
    percent = in_percent(*intervals)
    unit = f"% change from {base}" if percent else f"times that of {base}"
    cells = [ratio_cell(interval, beyond=beyond, percent=percent) for interval in intervals]
    return Cell(text=head or unit, note=unit if head else "", beyond=beyond), cells


def length_groups(columns: list[Cell], trained: int) -> list[tuple[Cell, int]]:
    """Return heads above columns: up to the trained length, and beyond it."""
    groups = []
    for beyond, text in ((False, f"up to {trained:,}"), (True, f"beyond {trained:,}")):
        if count := sum(column.beyond == beyond for column in columns):
            groups.append((Cell(text=text, beyond=beyond), count))
    return groups


def length_heads(lengths: list[int], trained: int) -> list[Cell]:
    """Return a column head for each length."""
    return [Cell(text=f"{length:,}", beyond=length > trained) for length in lengths]
