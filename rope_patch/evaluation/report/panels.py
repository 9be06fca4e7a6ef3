"""Panels: lines over lengths or positions, the important ones in colour, drawn with matplotlib."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MultipleLocator,
    NullLocator,
    PercentFormatter,
)
from matplotlib.transforms import ScaledTranslation

from rope_patch.evaluation.report.picture import METHOD, WIDE_WIDTH, Picture, render_picture
from rope_patch.evaluation.report.ranking import BEST, PLAIN, REST
from rope_patch.evaluation.report.table import CONTROL
from rope_patch.utils.plot_style import FONT, PAPER

# Above this no vocabulary has a perplexity that means anything; such points sit at the top.
_OFF_SCALE = 1e6
_MIN_TICKS = 3
_DODGE = 5.0  # pixels between the intervals of neighbouring lines
_TICKS_OF_A_DECADE = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(range(1, 10)))


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        label: Its name at its end.
        key: The name of its colour; lines in `REST` are thin, and share one label.
        points: x and y.
        marker: matplotlib's marker; none if empty.
        method: What filters know it by.
        intervals: x, low and high.
        dashes: Points on and off of a dashed line; none of a solid one.
    """

    label: str
    key: str
    points: list[tuple[float, float]]
    marker: str = ""
    method: str = ""
    intervals: list[tuple[float, float, float]] = field(default_factory=list)
    dashes: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        lines: The lines, the important ones first.
        trained_length: Where the shade begins, in units of x.
        x: What x is.
        y: What y is.
        title: Which of several panels it is.
        log_x: Whether x is logarithmic.
        log_y: Whether y may be logarithmic.
        as_percent: Whether y goes from 0 to 100%.
        bands: Whether intervals are bands, along the plain model's line and the best method's;
            else each line in colour has a whisker a point.
        ticks: Ticks of x; chosen where there are none.
        y_limits: The ends of y, such as those of the panels beside it; chosen if None.
    """

    lines: list[Line]
    trained_length: int
    x: str
    y: str
    title: str = ""
    log_x: bool = False
    log_y: bool = True
    as_percent: bool = False
    bands: bool = True
    ticks: list[float] = field(default_factory=list)
    y_limits: tuple[float, float] | None = None


def draw_panels(name: str, question: str, alt: str, panels: list[Panel]) -> Picture:
    """Draw panels below one another, each line labelled at its end, or below if labels are long.

    Args:
        name: The picture's file name.
        question: What it answers, its title.
        alt: What it shows, for those who do not see it.
        panels: At least one.
    """
    labels = max((_labels(panel) for panel in panels), key=len)
    longest = max(len(label) for panel in panels for label, _, _ in _labels(panel))

    def paint(width: int) -> Figure:
        wide = width == WIDE_WIDTH
        direct = len(labels) <= 8 and longest <= (26 if wide else 12)
        high, below, right = 315 if wide else 240, 52, 20 + 7 * longest
        columns = max(1, min(3, (width - 66) // (48 + 8 * longest))) if wide else 1
        if not direct:
            below, right = below + 12 + 21 * math.ceil(len(labels) / columns), 14
        title = textwrap.wrap(question, 90 if wide else 38)
        above = 22 * len(title) + 8
        row = 34 + high + below
        total = above + row * len(panels)
        figure = Figure(figsize=(width / 72, total / 72))
        place: Any = {"ha": "left", "va": "top", "weight": "bold", "linespacing": 1.35}
        figure.text(4 / width, 1 - 2 / total, "\n".join(title), color=PAPER["ink"], **place)
        for i, panel in enumerate(panels):
            bottom = total - above - row * (i + 1) + below
            box = (66 / width, bottom / total, (width - 66 - right) / width, high / total)
            axes = figure.add_axes(box)
            roof = _scale_y(axes, panel)
            _scale_x(axes, panel, 8 if wide else 4)
            handles = _draw_lines(axes, panel, roof)
            if direct:
                _label_line_ends(axes, panel, roof, high)
            else:
                shown = [(handles[line.label], text) for text, _, line in _labels(panel)]
                # With a space in front, because matplotlib leaves out labels that start with a _.
                texts = [" " + _abbreviate(text, 100 if wide else 38) for _, text in shown]
                corner = (52 / width, (bottom - 52) / total)
                look: Any = {"loc": "upper left", "borderpad": 0, "ncols": columns}
                figure.legend([h for h, _ in shown], texts, bbox_to_anchor=corner, **look)
        return figure

    return render_picture(name, alt, paint)


def _labels(panel: Panel) -> list[tuple[str, str, Line]]:
    """Return each label with its colour and line; all grey lines have one together."""
    labels = [(line.label, line.key, line) for line in panel.lines if line.key != REST]
    rest = [line for line in panel.lines if line.key == REST]
    if rest:
        text = rest[0].label if len(rest) == 1 else f"{len(rest)} other methods"
        middle = sorted(rest, key=lambda line: line.points[-1][1])[len(rest) // 2]
        labels.append((text, "muted", middle))
    return labels


def _draw_lines(axes: Axes, panel: Panel, roof: float) -> dict[str, Any]:
    """Draw the lines and return a handle for each label."""
    handles: dict[str, Any] = {}
    coloured = [line for line in panel.lines if line.key != REST]
    for line in [*(line for line in panel.lines if line.key == REST), *reversed(coloured)]:
        transform = axes.transData
        if line in coloured and line.intervals and not panel.bands:
            shift = _DODGE * (coloured.index(line) - (len(coloured) - 1) / 2)
            figure: Any = axes.figure
            transform = transform + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
        artists = _draw_line(axes, panel, line, roof, transform)
        handles[line.label] = artists[0]
        if line.method:  # marks in the SVG which method a part of it belongs to
            for artist in artists:
                artist.set_gid(f"{METHOD}{line.method}")
    return handles


def _draw_line(axes: Axes, panel: Panel, line: Line, roof: float, transform: Any) -> list[Any]:
    rest, colour = line.key == REST, PAPER[line.key]
    order = 2.6 if rest else 3.0
    look: Any = {"color": colour, "lw": 0.9 if rest else 1.9, "zorder": order}
    if line.key == CONTROL:
        # The control's rings go around the points that it is compared with.
        look |= {"ls": (0, (1, 2)), "markersize": 9.5, "mfc": "none", "mew": 1.1, "zorder": 4}
    elif not rest:
        look |= {"markersize": 4.5}
    if line.dashes is not None:
        look |= {"ls": (0, line.dashes), "lw": 1.4}
    x = [point[0] for point in line.points]
    y = [min(value, roof) for _, value in line.points]
    artists: list[Any] = axes.plot(
        x, y, marker="" if rest else line.marker, transform=transform, **look
    )
    # More than two bands would hide one another.
    shown = not panel.bands or line.key in (PLAIN, BEST)
    intervals = [i for i in line.intervals if i[1] <= roof] if shown and not rest else []
    if intervals:
        at, low, high = zip(*intervals, strict=True)
        top = [min(value, roof) for value in high]
        if panel.bands:
            band: Any = {"color": colour, "alpha": 0.13, "lw": 0, "zorder": 2.5}
            artists.append(axes.fill_between(at, low, top, **band))
        else:
            whisker: Any = {"color": colour, "lw": 1.2, "alpha": 0.75, "zorder": order}
            artists.append(axes.vlines(at, low, top, transform=transform, **whisker))
    off = [point[0] for point in line.points if point[1] > roof]
    if off and not rest:
        artists += axes.plot(off, [roof] * len(off), "^", color=colour, ms=10, zorder=3)
        endless = math.inf in dict(line.points).values()
        text = ("infinite" if endless else f"over {_OFF_SCALE:,.0f}") + 3 * "\u00a0"
        artists.append(axes.text(off[0], roof, text, color=colour, ha="right", va="center"))
    return artists


def _scale_x(axes: Axes, panel: Panel, ticks: int) -> None:
    x = [point[0] for line in panel.lines for point in line.points]
    # Every second length or so where there is no room for all.
    some = panel.ticks[:: -(-len(panel.ticks) // ticks) or 1]
    if panel.log_x:
        axes.set_xscale("log")
        axes.set_xlim(min(x) / 1.3, max(*x, panel.trained_length) * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(some) if some else LogLocator(numticks=ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(x) * (1.04 if some else 1.01))
        # Steps of a power of two, as lengths mostly are.
        steps = MultipleLocator(2 ** math.ceil(math.log2(max(x) / ticks)))
        axes.xaxis.set_major_locator(FixedLocator(some) if some else steps)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.set_title(_abbreviate(panel.title, 60), loc="left", fontsize=FONT, pad=9)
    low, high = axes.get_xlim()
    if low < panel.trained_length < high:
        axes.axvspan(panel.trained_length, high, color=PAPER["shade"], lw=0, zorder=0)
        axes.axvline(panel.trained_length, color=PAPER["muted"], lw=1.2, zorder=2)
        text = f"trained on {panel.trained_length:,}"
        place: Any = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        where, offset = "center", (0, 7)
        if panel.title and panel.trained_length <= min(x):  # there it would run into the title
            where, offset = "left", (5, -14)
        axes.annotate(
            text, (panel.trained_length, 1), offset, color=PAPER["muted"], ha=where, **place
        )


def _scale_y(axes: Axes, panel: Panel) -> float:
    """Set the y axis, logarithmic over a factor of 5; return where larger values are drawn."""
    if panel.as_percent:
        axes.set_ylim(-0.03, 1.05)
        axes.yaxis.set_major_locator(MultipleLocator(0.2))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return 1.0
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        return panel.y_limits[1]
    values = [y for line in panel.lines for _, y in line.points]
    shown = [value for value in values if 0 < value <= _OFF_SCALE] or [1.0]
    coloured = [i for line in panel.lines if line.key != REST for i in line.intervals]
    low = min([*shown, *(bottom for _, bottom, _ in coloured if bottom > 0)])
    # Intervals widen the axis, but a wide one must not flatten the lines.
    high = max([*shown, *(top for _, _, top in coloured if top <= 2 * max(shown))])
    off = any(value > _OFF_SCALE for value in values)
    if panel.log_y and high / low > 5:
        roof = high * 1.5 if off else high
        floor, ceiling = low / 1.25, roof * (roof / low) ** 0.1
        axes.set_yscale("log")
        axes.set_ylim(floor, ceiling)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(floor, ceiling)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = max(high - low, 0.05 * high) * 0.12
        roof = high + 3 * pad if off else high
        axes.set_ylim(0 if not panel.log_y else low - pad, roof + 2 * pad)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return roof


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a logarithmic axis: few, but at least three."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _TICKS_OF_A_DECADE:
        ticks = [t for d in decades for s in steps if low <= (t := float(f"{s}e{d}")) <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    return ticks


def _label_line_ends(axes: Axes, panel: Panel, roof: float, high: float) -> None:
    """Write each label to the right of its line's last point, without overlaps."""
    gap, at = 1.35 * FONT / high, -1.0
    ends = []
    for text, key, line in _labels(panel):
        last = next((y for _, y in reversed(line.points) if not math.isnan(y)), roof)
        spot = axes.transAxes.inverted().transform(axes.transData.transform((1, min(last, roof))))
        ends.append((float(spot[1]), text, key, line))
    ends.sort(key=lambda end: end[0])
    # Upwards past the one below, from as far down as leaves room for those above.
    for i, (y, text, key, line) in enumerate(ends):
        at = max(min(y, 1 - gap * (len(ends) - 1 - i)), at + gap)
        look: Any = {"color": PAPER[key], "va": "center_baseline"}
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        label = axes.annotate(text, (1, at), (11, 0), **place, **look)
        if line.method and key == line.key:
            label.set_gid(f"{METHOD}{line.method}")


def _abbreviate(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
