"""Plot of the kernel benchmark: speed by length, a panel per shape and phase."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from rope_patch.benchmarks.kernels.benchmark import COPIES
from rope_patch.benchmarks.kernels.tables import (
    COLOURS,
    PHASES,
    default_layout_cases,
    is_in_l2,
    row_of,
)
from rope_patch.benchmarks.kernels.workers import BACKWARD, FORWARD
from rope_patch.evaluation.report.picture import Picture, render_picture
from rope_patch.utils.plot_style import PALETTE

_PHASES = (FORWARD, BACKWARD)
_MARKERS = dict(zip(COLOURS, "osD^vPX<>*hp", strict=True))
_WIDE_WIDTH = 640  # pixels from which two panels are side by side
_HIGH, _ABOVE, _BELOW, _LINE = 200, 40, 52, 21  # pixels; the last is a line of the legend

_TALL = 160  # percent; points that a cache makes faster may leave the panel

Points = dict[str, list[tuple[int, float]]]


def draw(results: dict[str, Any]) -> Picture | None:
    """Draw per cent of a copy's bandwidth for correct results of the smallest batch, if any."""
    panels = [
        (f"{shape}: {PHASES[phase].lower()}", points, _longest_in_l2(results, shape))
        for shape in results["shapes"]
        for phase in _PHASES
        if (points := _points(results, shape, phase))
    ]
    if not panels:
        return None
    contenders = [
        name for name in results["titles"] if any(name in points for _, points, _ in panels)
    ]

    def paint(width: int) -> Figure:
        columns = len(_PHASES) if width >= _WIDE_WIDTH else 1
        rows = math.ceil(len(panels) / columns)
        legend = _LINE * math.ceil(len(contenders) / (3 if columns > 1 else 1)) + 12
        high = rows * (_ABOVE + _HIGH + _BELOW) + legend
        figure = Figure(figsize=(width / 72, high / 72))
        for i, (title, points, cached) in enumerate(panels):
            row, column = divmod(i, columns)
            left, wide = 66 + column * width / columns, width / columns - 86
            top = row * (_ABOVE + _HIGH + _BELOW) + _ABOVE
            box = (left / width, 1 - (top + _HIGH) / high, wide / width, _HIGH / high)
            _plot_lines(figure.add_axes(box), title, points, cached)
        # The leading space keeps labels that start with a _, which matplotlib would drop.
        labels = [" " + results["titles"][name] for name in contenders]
        figure.legend(
            [_legend_handle(figure, name) for name in contenders],
            labels,
            loc="lower left",
            bbox_to_anchor=(40 / width, 0),
            borderpad=0,
            ncols=3 if columns > 1 else 1,
        )
        return figure

    alt = "Per cent of a copy's bandwidth by length, a line for each contender"
    return render_picture("speed", alt, paint)


def _longest_in_l2(results: dict[str, Any], shape: str) -> int:
    """Return the longest length in tokens at which the L2 cache holds all samples; 0 if none."""
    cases = default_layout_cases(results, shape)
    return max((case["length"] for case in cases if is_in_l2(results, case)), default=0)


def _points(results: dict[str, Any], shape: str, phase: str) -> Points:
    cases = [case for case in default_layout_cases(results, shape) if case["length"] > 1]
    smallest = min((case["batch"] for case in cases), default=0)
    points: Points = {}
    for case in (case for case in cases if case["batch"] == smallest):
        for name in (name for name in results["titles"] if name not in COPIES):
            row = row_of(case, name)
            if phase in row["times"] and not row["wrong"]:
                points.setdefault(name, []).append((case["length"], row["times"][phase]["percent"]))
    return points


def _plot_lines(axes: Axes, title: str, points: Points, cached: int) -> None:
    for name, line in points.items():
        axes.plot(*zip(*line, strict=True), **_line_style(name))
    lengths = sorted({length for line in points.values() for length, _ in line})
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.4, lengths[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda length, _: _format_tokens(length))
    axes.set_xlabel("tokens")
    fastest = max(percent for line in points.values() for _, percent in line)
    axes.set_ylim(0, min(max(105, 1.05 * fastest), _TALL))
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set_ylabel("of a copy's bandwidth")
    axes.axhline(100, color=PALETTE["muted"][0], lw=1.2, zorder=2)
    if cached >= lengths[0]:
        axes.axvspan(lengths[0] / 1.4, cached * 1.4, color=PALETTE["muted"][0], alpha=0.12, lw=0)
        axes.text(lengths[0] / 1.3, 3, "in L2", color=PALETTE["muted"][0], fontsize=10, va="bottom")
    axes.set_title(title, loc="left", fontsize=12.5, pad=9)


def _line_style(name: str) -> dict[str, Any]:
    colour = PALETTE[COLOURS[name]][0]
    return {"color": colour, "marker": _MARKERS[name], "markersize": 4.5, "lw": 1.7, "zorder": 3}


def _legend_handle(figure: Figure, name: str) -> Any:
    return figure.axes[0].plot([], [], **_line_style(name))[0]


def _format_tokens(length: float) -> str:
    return f"{length / 1024:.0f}k" if length >= 1024 and length % 1024 == 0 else f"{length:.0f}"
