"""Draw pictures with matplotlib."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from rope_patch.pictures.picture import Curves, Dials, HeatMap, Panel, Path, Picture
from rope_patch.utils.plot_style import PAPER, STYLE, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _CAPTION_LINE = 912, 400, 19  # CSS pixels
_LEFT = 78  # for labels of the y axis
_CAPTION_COLUMNS = 132
_COLOURS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7")
_MARKS = ("o", "s", "^", "D")


def draw(picture: Picture) -> Figure:
    """Return a figure of a picture, its panels side by side and its caption below.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = textwrap.wrap(picture.caption, _CAPTION_COLUMNS)
    below = _CAPTION_LINE * len(lines) + 24
    height = _HEIGHT + below
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        columns = len(picture.panels)
        # Colour bars have their numbers on the right.
        right = 60 if any(isinstance(panel, HeatMap) for panel in picture.panels) else 24
        width = (_WIDTH - (_LEFT + right) * columns) / columns
        for number, panel in enumerate(picture.panels):
            left = _LEFT + number * (width + _LEFT + right)
            box = (left / _WIDTH, (below + 52) / height, width / _WIDTH, (_HEIGHT - 92) / height)
            _draw_panel(figure, box, panel)
        figure.text(
            24 / _WIDTH, 14 / height, "\n".join(lines), color=PAPER["ink"], va="bottom", ha="left"
        )
    return figure


def _draw_panel(figure: Figure, box: Any, panel: Panel) -> None:
    if isinstance(panel, Path):
        _draw_path(figure.add_axes(box, projection="3d"), panel)
        return
    axes = figure.add_axes(box)
    axes.set_title(panel.title, loc="left", fontsize=STYLE["font.size"], color=PAPER["ink"])
    if isinstance(panel, HeatMap):
        _draw_heat_map(figure, axes, panel)
    elif isinstance(panel, Curves):
        _draw_curves(axes, panel)
    else:
        _draw_dials(axes, panel)


def _draw_heat_map(figure: Figure, axes: Axes, panel: HeatMap) -> None:
    values = panel.values
    low, high = panel.limits or (None, None)
    # The lightness of this map grows with the value, so it reads in grey and for the colour-blind.
    image = axes.imshow(
        values.numpy(), cmap="cividis", vmin=low, vmax=high, aspect="auto", rasterized=True
    )
    axes.grid(visible=False)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03).outline.set_visible(False)


def _draw_curves(axes: Axes, panel: Curves) -> None:
    if panel.y_log:
        axes.set_yscale("log")
        # The usual powers of ten would need mathtext.
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    if panel.equal:
        axes.set_aspect("equal", adjustable="datalim")
    for number, curve in enumerate(panel.curves):
        style: Any = {"color": PAPER[_COLOURS[number % len(_COLOURS)]], "label": curve.label}
        if curve.marked:
            style |= {"linestyle": "none", "marker": _MARKS[number % 4], "markersize": 4}
        elif curve.dashed:
            style |= {"linestyle": "--"}
        axes.plot(curve.x.numpy(), curve.y.numpy(), **style)
    for name, place in panel.bounds.items():
        axes.axvline(place, color=PAPER["muted"], linestyle=":")
        axes.annotate(
            name, (place, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
            textcoords="offset points", color=PAPER["muted"],
        )  # fmt: skip
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(fontsize=10, frameon=True, framealpha=0.85, edgecolor="none")


def _draw_dials(axes: Axes, panel: Dials) -> None:
    from matplotlib.patches import Circle, Wedge

    columns = math.ceil(len(panel.dials) / 2)
    axes.set_axis_off()
    axes.set_aspect("equal")
    for number, dial in enumerate(panel.dials):
        x, y = 2.6 * (number % columns), -3.1 * (number // columns)
        arc = math.degrees(dial.trained_arc)
        axes.add_patch(Wedge((x, y), 1, 0, arc, facecolor=PAPER["line"], edgecolor="none"))
        axes.add_patch(Circle((x, y), 1, fill=False, edgecolor=PAPER["muted"]))
        end = (x + math.cos(dial.angle), y + math.sin(dial.angle))
        axes.plot([x, end[0]], [y, end[1]], color=PAPER["m1"], linewidth=2.5)
        axes.text(x, y - 1.12, dial.title, ha="center", va="top", color=PAPER["muted"])
    axes.set_xlim(-1.2, 2.6 * (columns - 1) + 1.2)
    axes.set_ylim(-3.1 * ((len(panel.dials) - 1) // columns) - 1.7, 1.2)


def _draw_path(axes: Any, panel: Path) -> None:
    points = panel.points.numpy()
    axes.set_title(panel.title, loc="left", fontsize=STYLE["font.size"], color=PAPER["ink"])
    axes.plot(*points.T, color=PAPER["m0"], linewidth=1.2, marker="o", markersize=4)
    axes.set_box_aspect((1, 1, 1), zoom=0.9)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_ticklabels([])
