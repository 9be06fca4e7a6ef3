"""Tables for HTML, Markdown and terminals alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rope_patch.statistics import Interval
from rope_patch.utils import errors
from rope_patch.utils.checksums import digest

# Names of colours, next to m0, m1, ... for the methods.
PLAIN = "plain"
CONTROL = "control"
NOTHING = "–"

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

    Rows with the same `group` stand below that head; `method` and `task` are what filters go by.
    """

    name: str
    cells: list[Cell]
    key: str = ""
    group: str = ""
    method: str = ""
    task: str = ""


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


def aligned_text(table: Table) -> str:
    """Return a table as aligned lines of text, below its name."""
    heads = [group.text for group, span in table.groups for _ in range(span)]
    lines = [[table.corner, *map(_cell_text, table.columns)]]
    if heads:
        lines.insert(0, ["", *heads])
    for row in table.rows:
        name = f"{row.group}, {row.name}" if row.group else row.name
        lines.append([name, *map(_cell_text, row.cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([table.name, *aligned])


def _cell_text(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def one_line(text: Any) -> str:
    """Return any text as one printable line, however long."""
    return errors.one_line(text, max_length=None)


def filter_mark(text: str) -> str:
    """Return a name as filters know it, whatever characters it has."""
    return f"f{digest(text.encode('utf-8', 'replace'), 8)}"


def percent(share: float) -> str:
    """Return a share as a percentage: 92%; never 100% or 0% where a little is missing."""
    whole = 100 * share
    digits = 0 if round(whole) not in (0, 100) or math.isclose(whole, round(whole)) else 1
    return f"{whole:.{digits}f}%"


def percent_range(interval: Interval) -> str:
    """Return an interval of shares: 84–96%."""
    high = f"{100 * interval.high:.0f}%" if math.isfinite(interval.high) else "∞"
    return f"{100 * interval.low:.0f}–{high}"


def n_text(interval: Interval) -> str:
    """Return how many samples an interval rests on, and as how many they count."""
    unit = "" if interval.unit == "samples" else interval.unit
    text = f"n = {interval.n:,.0f}{' ' * bool(unit)}{unit}"
    if interval.effective_n < 0.95 * interval.n:
        text += f", effectively {interval.effective_n:,.0f}"
    return text


def perplexity_text(value: Any) -> str:
    """Return a perplexity to three digits or so: 8.03, 15.2, 397."""
    if value is None:
        return NOTHING
    value = float(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞"
    for limit, digits in ((10, 2), (100, 1)):
        if round(value, digits) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def perplexity_range(interval: Interval) -> str:
    """Return an interval of perplexities: 14.8–15.9; nothing without bounds."""
    if interval.low <= 0 and interval.high == math.inf:
        return ""
    return f"{perplexity_text(interval.low)}–{perplexity_text(interval.high)}"


def change_text(change: float | None) -> str:
    """Return a ratio as a change: +0.7%, −3.0%, and ×3.0 from a factor of two on."""
    if change is None or math.isnan(change):
        return NOTHING
    if not math.isfinite(change):
        return "×∞"
    if not 0.5 < change < 2:
        return f"×{change:,.0f}" if change >= 10 else f"×{change:.{1 if change >= 2 else 2}f}"
    percent = f"{abs(change - 1):.1%}"
    sign = "±" if percent == "0.0%" else "+" if change > 1 else "−"
    return sign + percent


def change_range(interval: Interval) -> str:
    """Return an interval of ratios: −0.2 to +1.6%; nothing without bounds."""
    if interval.low <= 0 and interval.high == math.inf:
        return ""
    low, high = change_text(interval.low), change_text(interval.high)
    return f"{low.removesuffix('%') if high.endswith('%') else low} to {high}"


def points_text(difference: float) -> str:
    """Return a difference of shares in points: +1.2, −3.0."""
    text = f"{abs(100 * difference):.1f}"
    return ("±" if text == "0.0" else "+" if difference > 0 else "−") + text


def points_range(interval: Interval) -> str:
    """Return an interval of differences in points: −1.0 to +3.2."""
    return f"{points_text(interval.low)} to {points_text(interval.high)}"


def p_text(p: float) -> str:
    """Return a p-value: p = 0.03, p < 0.001."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def perplexity_cell(interval: Interval | None, *, beyond: bool = False) -> Cell:
    """Return a perplexity with its interval."""
    if interval is None:
        return Cell(text=NOTHING, tip="not measured", beyond=beyond)
    text, span = perplexity_text(interval.estimate), perplexity_range(interval)
    tip = f"perplexity {text}, 95% interval {span or 'unknown'}, {n_text(interval)}"
    return Cell(text=text, note=span, tip=tip, beyond=beyond)


def ratio_cell(interval: Interval | None, *, beyond: bool = False) -> Cell:
    """Return a ratio of perplexities with its interval."""
    if interval is None:
        return Cell(text=NOTHING, beyond=beyond)
    text, span = change_text(interval.estimate), change_range(interval)
    tip = f"{text}, 95% interval {span or 'unknown'}, paired, {n_text(interval)}"
    # Where nothing can be said of the interval, that is what must be said.
    return Cell(text=text, note=span or "no interval", tip=tip, beyond=beyond)


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
