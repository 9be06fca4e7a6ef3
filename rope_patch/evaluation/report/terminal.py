"""The report in a terminal: the headline and the summary's table, no wider than the window."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import Any

from rope_patch.evaluation.report.table import Cell, Table

_WIDTH = 100  # columns where no terminal tells its own
_GAP = "  "
_MIN_NAME = 16  # columns that a method's name keeps where the window is narrow
_BEST = "* "


def overview(page: dict[str, Any], width: int | None = None) -> str:
    """Return the title, each run's headline, the table and cautions.

    Args:
        page: The data of the report's templates.
        width: Columns of the terminal; asked of it if None.
    """
    width = width or shutil.get_terminal_size((_WIDTH, 24)).columns
    runs = page["runs"]
    alone = len(runs) == 1
    lines = [page["title"]]
    for run in runs:
        lines.append(run["headline"] if alone else f"{run['title']}: {run['headline']}")
    parts = ["\n".join(_wrapped(line, width) for line in lines)]
    if page["summary"] is not None:
        parts.append(fitted_table(page["summary"], width))
    parts += [_wrapped(line, width) for line in page["summary_lines"]]
    cautions = [
        f"caution: {caution}" if alone else f"caution, {run['title']}: {caution}"
        for run in runs
        for caution in [*run["warnings"], *run["cautions"]]
    ]
    if cautions:
        parts.append("\n".join(cautions))
    return "\n\n".join(parts)


def fitted_table(table: Table, width: int) -> str:
    """Return the rows before a table's fold as lines of at most a width.

    Heads are wrapped. Columns that do not fit are left out from the right; the last line names them
    and tells how many rows there are behind the fold.

    Args:
        table: A table.
        width: Columns of the terminal.
    """
    names = [f"{row.group}, {row.name}" if row.group else row.name for row in table.shown]
    marks = [_BEST if row.best else "" for row in table.shown]
    names = [mark + name for mark, name in zip(marks, names, strict=True)]
    columns = [[_text(row.cells[i]) for row in table.shown] for i in range(len(table.columns))]
    heads = [
        [*_head_lines(head, cells)] for head, cells in zip(table.columns, columns, strict=True)
    ]
    widths = [max(map(len, [*head, *cells])) for head, cells in zip(heads, columns, strict=True)]
    room = width - len(_GAP) - max([_MIN_NAME, *(min(len(name), width // 3) for name in names)])
    shown = 0
    while shown < len(widths) and widths[shown] + len(_GAP) <= room:
        room -= widths[shown] + len(_GAP)
        shown += 1
    name_width = width - len(_GAP) - sum(w + len(_GAP) for w in widths[:shown])
    name_width = min(name_width, max(map(len, [table.corner, *names])))
    depth = max((len(head) for head in heads[:shown]), default=1)
    lines = []
    for i in range(depth):
        cells = [(head + [""] * depth)[i] for head in heads[:shown]]
        lines.append(_line(table.corner if i == 0 else "", cells, name_width, widths))
    for name, row in zip(names, range(len(names)), strict=True):
        cells = [column[row] for column in columns[:shown]]
        first, *rest = textwrap.wrap(name, name_width) or [""]
        lines.append(_line(first, cells, name_width, widths))
        lines += [_line(f"  {more}"[:name_width], [], name_width, widths) for more in rest]
    parts = [_wrapped(f"{table.name}:", width), *lines]
    hints = []
    if table.folded:
        hints.append(f"{len(table.folded)} more rows")
    if missing := [head.text for head in table.columns[shown:]]:
        hints.append(f"the columns {', '.join(missing)}")
    if any(marks):
        parts.append(_wrapped(f"{_BEST}all others are shown to be worse", width))
    if hints:
        parts.append(_wrapped(f"In the report: {'; '.join(hints)}.", width))
    return "\n".join(parts)


def _line(name: str, cells: list[str], name_width: int, widths: list[int]) -> str:
    padded = [cell.ljust(w) for cell, w in zip(cells, widths, strict=False)]
    return (_GAP + _GAP.join([name.ljust(name_width), *padded])).rstrip()


def _head_lines(head: Cell, cells: list[str]) -> list[str]:
    """Return a head in lines that are about as wide as the column's cells."""
    words = [*head.text.split(), *head.note.split()]
    width = max([12, *map(len, cells), *map(len, words)])
    return [*textwrap.wrap(head.text, width), *textwrap.wrap(head.note and f"({head.note})", width)]


def _text(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _wrapped(text: str, width: int) -> str:
    # An equation stays on one line: textwrap does not break at a non-breaking space.
    whole = re.sub(r"\b([pn]) ([=<]) ", "\\1\u00a0\\2\u00a0", text)
    lines = textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\u00a0", " ")
