"""The row of a method: its name, its colour in the figures and its filter mark."""

from __future__ import annotations

from rope_patch.evaluation.report.format import filter_mark
from rope_patch.evaluation.report.results.base import RunResults
from rope_patch.evaluation.report.table import Cell, Row


def method_row(
    run: RunResults, label: str, cells: list[Cell], group: str = "", task: str = ""
) -> Row:
    """Return the row of a method in a table of one run.

    Args:
        run: The run.
        label: The method's label.
        cells: The row's cells.
        group: The head above the row; none if empty.
        task: The task that filters know the row by; none if empty.
    """
    return Row(
        name=run.names[label],
        key=run.colour_names[label],
        cells=cells,
        group=group,
        method=filter_mark(label),
        task=filter_mark(task) if task else "",
    )
