"""Tables for HTML, Markdown and terminals alike, and numbers and names as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.statistics import ClusteredMean, Interval
from rope_patch.utils import errors
from rope_patch.utils.checksums import digest
from rope_patch.utils.terminal import SignedFormat, align

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
    tip: str = ""  # the whole story, shown on hovering
    beyond: bool = False  # whether the model was not trained on such a position or length
    share: float | None = None  # 0 to 1; the colour in a heat map


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
    def note(self) -> str:
        """Return what a table's signs mean, if it has some."""
        has_gaps = any(NOTHING in cell.text for row in self.rows for cell in row.cells)
        return f"{NOTHING}: not measured" if has_gaps else ""

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
    lines = [[table.corner, *map(cell_text, table.columns)]]
    if heads:
        lines.insert(0, ["", *heads])
    for row in table.rows:
        name = f"{row.group}, {row.name}" if row.group else row.name
        lines.append([name, *map(cell_text, row.cells)])
    aligned = [f"  {line}" for line in align(lines)]
    return "\n".join([table.name, *aligned])


def markdown_text(table: Table) -> str:
    """Return a table in Markdown, without its name."""
    head = [table.corner, *map(cell_text, table.columns)]
    rows = [[row.name, *map(cell_text, row.cells)] for row in table.rows]
    return "\n".join(errors.markdown_table([head, *rows], "l" + "r" * len(table.columns)))


def cell_text(cell: Cell) -> str:
    """Return a cell's text with its note in brackets."""
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def nats_cell(loss: ClusteredMean | None, more: str = "", *, beyond: bool = False) -> Cell:
    """Return a loss in nats a token with its interval.

    Args:
        loss: The loss.
        more: What the tip says behind the loss.
        beyond: Whether it is of texts beyond the trained length.
    """
    if loss is None:
        return Cell(text=NOTHING, tip="not measured", beyond=beyond)
    text, span = nats_text(loss.mean.estimate), nats_range(loss.mean)
    tip = f"{text} nats a token{more}, 95% interval {span or 'unknown'}"
    tip += f", n = {loss.mean.n:,.0f}, {loss.mean.effective_n:,.0f} texts"
    return Cell(text=text, note=span, tip=tip, beyond=beyond)


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
        intervals: The ratios.
        head: What is compared; empty where the column beside it says so.
        base: What it is compared with, such as "the plain model".
        beyond: Whether it is of texts beyond the trained length.
    """
    percent = in_percent(*(None if is_unknown(interval) else interval for interval in intervals))
    unit = f"% change from {base}" if percent else f"times that of {base}"
    cells = [
        Cell(text=UNKNOWN, tip="above 1 or below it, by far", beyond=beyond)
        if is_unknown(interval)
        else ratio_cell(interval, beyond=beyond, percent=percent)
        for interval in intervals
    ]
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


NOTHING = "–"  # not measured, and nothing else; each table that has one says so
BASE = "base"  # what the others of its column are compared with
UNKNOWN = "cannot tell"
_TENTHS = SignedFormat(1, minus="−", zero="±")  # of percent, or of a point
_MANY_TIMES = 3  # a ratio from which on "times" reads better than a percentage


def one_line(text: Any) -> str:
    """Return any text as one printable line, however long."""
    return errors.one_line(text, max_length=None)


def join_words(texts: Sequence[str]) -> str:
    """Return texts as a list within a sentence: a, b and c."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last


def first_few(texts: Sequence[str], most: int, more: str = "{} more") -> list[str]:
    """Return the first texts, and how many others there are: a, b, 3 more."""
    left = len(texts) - most
    return [*texts[:most], more.format(left)] if left > 0 else list(texts)


def filter_mark(text: str) -> str:
    """Return a name's mark for filters, free of special characters."""
    return f"f{digest(text.encode('utf-8', 'replace'), 8)}"


def percent(share: float) -> str:
    """Return a share as a percentage: 92%; never 100% or 0% where a little is missing.

    What is kept of a score may be more than all of it, or worse than a guess: 100% or 0%.
    """
    whole = 100 * min(max(share, 0.0), 1.0)
    digits = 0 if round(whole) not in (0, 100) or math.isclose(whole, round(whole)) else 1
    return f"{whole:.{digits}f}%"


def percent_range(interval: Interval) -> str:
    """Return an interval of shares: 84 to 96%."""
    low, high = (100 * min(max(bound, 0.0), 1.0) for bound in (interval.low, interval.high))
    return f"{low:.0f} to {high:.0f}%"


def share_with_interval(interval: Interval) -> str:
    """Return a share with its interval and n: 92% (84 to 96%, n = 40)."""
    return f"{percent(interval.estimate)} ({percent_range(interval)}, {n_text(interval)})"


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
    """Return an interval of perplexities: 14.8 to 15.9; nothing without bounds."""
    if interval.low <= 0 and interval.high == math.inf:
        return ""
    return f"{perplexity_text(interval.low)} to {perplexity_text(interval.high)}"


def perplexity_with_interval(interval: Interval, *, with_n: bool = False) -> str:
    """Return a perplexity with its interval: 15.2 (14.8 to 15.9), 15.2 (14.8 to 15.9, n = 40)."""
    span = perplexity_range(interval)
    return _with_notes(perplexity_text(interval.estimate), span, n_text(interval) * with_n)


def change_with_interval(ratio: Interval, *, with_n: bool = False) -> str:
    """Return a ratio as a change with its interval: +0.7% (−0.2 to +1.6%)."""
    return _with_notes(change_text(ratio), change_range(ratio), n_text(ratio) * with_n)


def _with_notes(text: str, *notes: str) -> str:
    """Return a text with what is known of its notes in brackets."""
    known = ", ".join(note for note in notes if note)
    return f"{text} ({known})" if known else text


def in_percent(*intervals: Interval | None) -> bool:
    """Return whether ratios read well as percentages: none is as much as three times."""
    values = [v for i in intervals if i is not None for v in (i.low, i.estimate, i.high)]
    return all(1 / _MANY_TIMES < value < _MANY_TIMES for value in values if not math.isnan(value))


def change_text(interval: Interval, *, percent: bool | None = None, unit: bool = True) -> str:
    """Return a ratio as a change, +0.7% or −3.0%, or as a factor, ×5.4.

    Args:
        interval: The ratio.
        percent: Whether as a percentage; where that reads well if None.
        unit: Whether with its unit.
    """
    return _ratio_text(interval.estimate, interval, percent, unit)


def change_range(interval: Interval, *, percent: bool | None = None, unit: bool = True) -> str:
    """Return an interval of ratios in one unit: −0.2 to +1.6%, ×2.0 to 2.2; nothing if unknown."""
    if interval.low <= 0 and interval.high == math.inf:
        return ""
    as_percent = in_percent(interval) if percent is None else percent
    low, high = (_ratio_text(v, interval, as_percent, unit) for v in (interval.low, interval.high))
    return f"{low.removesuffix('%')} to {high.removeprefix('×')}"


def _ratio_text(value: float, interval: Interval, percent: bool | None, unit: bool) -> str:
    if math.isnan(value):
        return UNKNOWN
    if in_percent(interval) if percent is None else percent:
        return f"{_TENTHS.number(100 * (value - 1))}{'%' * unit}"
    return f"{'×' * unit}{_factor_text(value, interval.high - interval.low)}"


def _factor_text(value: float, width: float) -> str:
    """Return a factor to as many digits as its interval's width leaves a meaning."""
    if not math.isfinite(value):
        return "∞"
    if value >= 10:
        return f"{value:,.0f}"
    digits = 3 if width < 0.1 else 2 if width < 1 or value < 1 else 1
    return f"{value:.{digits}f}" if value >= 0.005 else "<0.01"


def points_text(difference: float) -> str:
    """Return a difference of shares in points: +1.2, −3.0."""
    return _TENTHS.number(100 * difference)


def nats_text(nats: float) -> str:
    """Return a loss in nats to two digits behind the point: 0.89, −4.10."""
    return f"{nats:.2f}".replace("-", "−")


def nats_range(interval: Interval) -> str:
    """Return an interval of losses: 0.41 to 0.80, −4.20 to −0.89; nothing without bounds."""
    if not math.isfinite(interval.half_width):
        return ""
    return f"{nats_text(interval.low)} to {nats_text(interval.high)}"


def points_range(interval: Interval) -> str:
    """Return an interval of differences in points: −1.0 to +3.2."""
    return _TENTHS.range(100 * interval.low, 100 * interval.high)


def p_text(p: float) -> str:
    """Return a p-value: p = 0.03, p < 0.001."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
