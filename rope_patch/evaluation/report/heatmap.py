"""Retrieval heat maps as pictures: the cells of the report's tables, to attach elsewhere."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rope_patch.evaluation.report.figures import heat_colours
from rope_patch.evaluation.report.ranking import MAX_ROWS, Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.retrieval_tables import heat_maps, uniform_tasks
from rope_patch.evaluation.report.table import Table
from rope_patch.utils.plot_style import PALETTE

_INK, _MUTED = PALETTE["ink"][0], PALETTE["muted"][0]
_CELL, _ROW = 0.85, 0.5  # inches


def draw_heat_maps(stats: RunStatistics, ranking: Ranking) -> dict[str, bytes]:
    """Return a PNG for each task whose depths differ, by file name without ending.

    It has a panel for each of the best methods.
    """
    maps = {task: depth_maps(stats, ranking, task)[0] for task in stats.tasks}
    return {
        picture_name(task): _png(tables[:MAX_ROWS])
        for task, tables in maps.items()
        if tables and not single_samples(stats, task)
    }


def single_samples(stats: RunStatistics, task: str) -> bool:
    """Return whether no cell of a task's heat maps has more than one sample, which is no rate."""
    counts = Counter(
        (label, s["length"], s.get("depth"))
        for label in stats.labels
        for s in stats.samples(label, task)
    )
    return max(counts.values(), default=0) < 2


def depth_maps(stats: RunStatistics, ranking: Ranking, task: str) -> tuple[list[Table], list[str]]:
    """Return a task's heat maps, best method first, and lines on methods without a difference.

    A map that is the same in each cell, none right or all, says no more than a line does.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
        task: The task's name.
    """
    if task in uniform_tasks(stats):
        return [], []
    by_name = {table.name: table for table in heat_maps(stats, task)}
    tables: list[Table] = []
    uniform: dict[str, list[str]] = {}
    for labels in ranking.groups:
        name = next((n for label in labels if (n := stats.names[label]) in by_name), None)
        if name is None:
            continue
        table, joined = by_name[name], " = ".join(stats.names[label] for label in labels)
        shares = {cell.share for row in table.rows for cell in row.cells if cell.share is not None}
        if shares in ({0.0}, {1.0}):
            uniform.setdefault("All" if shares == {1.0} else "None", []).append(joined)
        else:
            colour = ranking.colours[labels[0]]
            tables.append(replace(table, name=joined, key=colour))
    lines = [
        f"{share} right at every length and depth: {', '.join(names)}."
        for share, names in uniform.items()
    ]
    return tables, lines


def picture_name(task: str) -> str:
    """Return the file name of a task's picture, safe for any task name."""
    return "retrieval-" + re.sub(r"[^\w-]", "_", str(task))


def _png(heat_maps: list[Table]) -> bytes:
    columns, rows = len(heat_maps[0].columns), len(heat_maps[0].rows)
    panel, margin = _CELL * columns + 0.35, 0.65
    height = _ROW * rows + 1.0
    width = panel * len(heat_maps) + margin
    figure = Figure(figsize=(width, height))
    for i, heat_map in enumerate(heat_maps):
        left = (margin + panel * i) / width
        box = (left, 0.5 / height, _CELL * columns / width, _ROW * rows / height)
        _draw_panel(figure.add_axes(box), heat_map, labelled=i == 0)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=144, facecolor="white")
    return file.getvalue()


def _draw_panel(axes: Axes, heat_map: Table, *, labelled: bool) -> None:
    for y, row in enumerate(heat_map.rows):
        for x, cell in enumerate(row.cells):
            fill, text = ("#ffffff", _MUTED) if cell.share is None else heat_colours(cell.share)
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor="white", lw=1.5))
            axes.text(x + 0.5, y + 0.42, cell.text, ha="center", va="center", color=text)
            axes.text(x + 0.5, y + 0.74, cell.note, ha="center", va="center", color=text, size=7)
    axes.set(xlim=(0, len(heat_map.columns)), ylim=(len(heat_map.rows), 0))
    axes.set_xticks([x + 0.5 for x in range(len(heat_map.columns))])
    axes.set_xticklabels([cell.text for cell in heat_map.columns], color=_MUTED, size=9)
    beyond = [x for x, cell in enumerate(heat_map.columns) if cell.beyond]
    if (first := min(beyond, default=0)) > 0:
        axes.axvline(first, color=_INK, lw=2)  # the trained length lies between these columns
    axes.set_yticks([y + 0.5 for y in range(len(heat_map.rows))])
    names = [row.name for row in heat_map.rows] if labelled else [""] * len(heat_map.rows)
    axes.set_yticklabels(names, color=_MUTED, size=9)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(heat_map.name, loc="left", color=_INK, size=11, parse_math=False)
