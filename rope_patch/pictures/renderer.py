"""Draw pictures, whose panels (heat maps, curves, clocks, walks) are plain numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rope_patch.utils.figures import FONT, PAPER, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths are in CSS pixels: at 72 dots per inch one point of matplotlib is one pixel.
_WIDTH, _HEIGHT, _CAPTION_LINE = 912, 400, 19
_ROW_HEIGHT = 200  # height of a panel without labels, where there are several rows
_DIAL_HEIGHT = 176  # height of a row of dials
_LEFT, _RIGHT, _BAR_RIGHT = 86, 24, 84  # space for labels of the y axis and of colour bars
_GAP = 22  # space between panels that share their labels
_TITLE, _BELOW, _NO_LABELS = 40, 52, 20
_LEGEND_RIGHT, _LEGEND_LINE = 176, 17  # beside a single panel; below one of several
_SLANTED = 30  # space that slanted names of columns take below
_CAPTION_COLUMNS = 128
_COLOURS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7")
# Lines and marks differ in more than colour, for those who see or print none.
_DASHES: Sequence[Any] = (
    "-", (0, (7, 2.5)), (0, (1.2, 1.6)), (0, (7, 2, 1.2, 2)), (0, (3, 1.4)),
    (0, (11, 2, 3, 2)), (0, (1.2, 3.5)), (0, (5, 2, 1.2, 2, 1.2, 2)),
)  # fmt: skip
_MARKS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class _Cell:
    """The place of a panel in the figure."""

    # Left, bottom, width and height, in shares of the figure.
    box: tuple[float, float, float, float]
    x_labelled: bool  # whether the x axis has its label
    y_labelled: bool  # whether the y axis has its label
    alone: bool  # whether it is the only panel
    tall: float  # the panel's height in pixels


@dataclass(frozen=True)
class _Frame:
    """The figure's measures in pixels."""

    height: float  # of the figure
    row_height: float  # of a row of panels with their titles
    below: float  # of the caption and of what is below the last row's axes


def draw(picture: Picture) -> Figure:
    """Return a figure of a picture, its panels in rows and its caption below.

    Raises:
        ValueError: matplotlib is not installed.
    """
    lines = textwrap.wrap(picture.caption, _CAPTION_COLUMNS)
    columns = picture.columns or len(picture.panels)
    rows = math.ceil(len(picture.panels) / columns)
    row_height = _ROW_HEIGHT if rows > 1 else _HEIGHT - 2 * _BELOW
    labels = _BELOW - _NO_LABELS
    if all(isinstance(panel, Dials) for panel in picture.panels):  # low, and without axes
        row_height, labels = _DIAL_HEIGHT, 0
    below = _CAPTION_LINE * len(lines) + 24 + labels + _room_below(picture.panels)
    frame = _Frame(below + rows * row_height + 12, row_height, below)
    shared = _shared_limits(picture.panels)
    with canvas(_WIDTH, frame.height) as page:
        image = None
        for number, panel in enumerate(picture.panels):
            cell = _cell(picture.panels, number, columns, frame, shared=shared is not None)
            drawn = _draw_panel(page.figure, cell, panel, bar=shared is None)
            image = drawn if drawn is not None else image
        if shared is not None:
            _draw_shared_bar(page.figure, image, frame, shared.unit)
        place: dict[str, Any] = {"va": "bottom", "ha": "left", "color": PAPER["ink"]}
        corner = page.share(24, frame.height - 14)
        page.figure.text(*corner, "\n".join(lines), **place)
    return page.figure


def _shared_limits(panels: Sequence[Panel]) -> HeatMap | None:
    """Return a panel whose colour bar serves all, if there are many with the same numbers."""
    maps = [panel for panel in panels if isinstance(panel, HeatMap)]
    if len(maps) < 3 or len(maps) < len(panels):
        return None
    alike = {(panel.limits, panel.unit) for panel in maps}
    return maps[0] if len(alike) == 1 and maps[0].limits is not None else None


def _room_below(panels: Sequence[Panel]) -> int:
    """Return the pixels that legends or names of columns take below the axes."""
    if len(panels) > 1:
        lines = [len(panel.curves) for panel in panels if isinstance(panel, Curves)]
        if lines:
            return _LEGEND_LINE * max(lines) + 6
    return _SLANTED if any(isinstance(p, HeatMap) and p.ticks for p in panels) else 0


def _cell(
    panels: Sequence[Panel], number: int, columns: int, frame: _Frame, *, shared: bool
) -> _Cell:
    row, column = divmod(number, columns)
    bottom = frame.height - 12 - (row + 1) * frame.row_height + _NO_LABELS
    tall = frame.row_height - _NO_LABELS - _TITLE
    if shared:
        width = (_WIDTH - _LEFT - _BAR_RIGHT - _GAP * (columns - 1)) / columns
        left = _LEFT + column * (width + _GAP)
    else:
        right = _BAR_RIGHT if any(isinstance(panel, HeatMap) for panel in panels) else _RIGHT
        if len(panels) == 1 and isinstance(panels[0], Curves):
            right = _LEGEND_RIGHT
        width = (_WIDTH - (_LEFT + right) * columns) / columns
        left = _LEFT + column * (width + _LEFT + right)
    box = (left / _WIDTH, bottom / frame.height, width / _WIDTH, tall / frame.height)
    is_last = (row + 1) * columns >= len(panels)
    return _Cell(box, not shared or is_last, not shared or column == 0, len(panels) == 1, tall)


def _draw_panel(figure: Figure, cell: _Cell, panel: Panel, *, bar: bool) -> Any:
    """Draw a panel; return the image of a heat map, else None."""
    if isinstance(panel, Path):
        _draw_path(figure.add_axes(cell.box, projection="3d"), panel)
        return None
    axes = figure.add_axes(cell.box)
    axes.set_title(panel.title, loc="left", fontsize=FONT, color=PAPER["ink"])
    if isinstance(panel, HeatMap):
        return _draw_heat_map(figure, axes, cell, panel, bar=bar)
    if isinstance(panel, Curves):
        _draw_curves(axes, cell, panel)
    else:
        _draw_dials(axes, panel)
    return None


def _draw_heat_map(figure: Figure, axes: Axes, cell: _Cell, panel: HeatMap, *, bar: bool) -> Any:
    low, high = panel.limits or (None, None)
    # The lightness of this map grows with the value, so it reads in grey and for the colour-blind.
    image = axes.imshow(
        panel.values.numpy(), cmap="cividis", vmin=low, vmax=high, aspect="auto",
        interpolation="none",
    )  # fmt: skip
    axes.grid(visible=False)
    axes.locator_params(integer=True)
    if panel.ticks:
        places = range(len(panel.ticks))
        axes.set_xticks(places, panel.ticks, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, panel.ticks)
    if cell.x_labelled:
        axes.set_xlabel(panel.x_label)
    else:
        axes.tick_params(labelbottom=False)
    if cell.y_labelled:
        axes.set_ylabel(panel.y_label)
    else:
        axes.tick_params(labelleft=False)
    if panel.trained is not None:
        edge = panel.trained - 0.5
        axes.plot(
            [-0.5, edge, edge], [edge, edge, -0.5], color="#8e8e8e", linestyle=(0, (4, 2)), lw=1.2
        )
    if bar:
        _style_bar(figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03), panel.unit)
    return image


def _draw_shared_bar(figure: Figure, image: Any, frame: _Frame, unit: str) -> None:
    bottom = frame.below + _NO_LABELS
    box = ((_WIDTH - _BAR_RIGHT + 12) / _WIDTH, bottom / frame.height, 12 / _WIDTH)
    axes = figure.add_axes((*box, (frame.height - 12 - _TITLE - bottom) / frame.height))
    _style_bar(figure.colorbar(image, cax=axes), unit)


def _style_bar(colours: Any, unit: str) -> None:
    colours.outline.set_visible(False)
    colours.set_label(unit)
    colours.ax.grid(visible=False)


def _draw_curves(axes: Axes, cell: _Cell, panel: Curves) -> None:
    if panel.y_log:
        axes.set_yscale("log")
        # The usual powers of ten would need mathtext.
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    if panel.equal:
        axes.set_aspect("equal", adjustable="box", anchor="W")
    for number, curve in enumerate(panel.curves):
        style: Any = {"color": PAPER[_COLOURS[number % len(_COLOURS)]], "label": curve.label}
        if curve.marked:
            style |= {"linestyle": "none", "marker": _MARKS[number % 4], "markersize": 4}
        else:
            style |= {"linestyle": _DASHES[number % len(_DASHES)]}
        axes.plot(curve.x.numpy(), curve.y.numpy(), **style)
    for name, place in panel.bounds.items():
        axes.axvline(place, color=PAPER["muted"], linestyle=":")
        axes.annotate(
            name, (place, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
            textcoords="offset points", color=PAPER["muted"],
        )  # fmt: skip
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    # Outside, so that it hides no line.
    corner = (1.0, 1.0) if cell.alone else (-0.02, -_BELOW / cell.tall)
    axes.legend(loc="upper left", bbox_to_anchor=corner, fontsize=10, handlelength=3.4)


def _draw_dials(axes: Axes, panel: Dials) -> None:
    from matplotlib.patches import Circle, Wedge

    axes.set_axis_off()
    axes.set_aspect("equal", anchor="NW")
    for number, dial in enumerate(panel.dials):
        x, y = 2.6 * number, 0.0
        arc = math.degrees(dial.trained_arc)
        axes.add_patch(Wedge((x, y), 1, 0, arc, facecolor=PAPER["line"], edgecolor="none"))
        axes.add_patch(Circle((x, y), 1, fill=False, edgecolor=PAPER["muted"]))
        end = (x + math.cos(dial.angle), y + math.sin(dial.angle))
        axes.plot([x, end[0]], [y, end[1]], color=PAPER["m1"], linewidth=2.5)
        axes.text(x, y - 1.12, dial.title, ha="center", va="top", color=PAPER["muted"])
    axes.set_xlim(-1.2, 2.6 * (len(panel.dials) - 1) + 1.2)
    axes.set_ylim(-1.7, 1.2)


def _draw_path(axes: Any, panel: Path) -> None:
    points = panel.points.numpy()
    axes.set_title(panel.title, loc="left", fontsize=FONT, color=PAPER["ink"])
    axes.plot(*points.T, color=PAPER["m0"], linewidth=1.2, marker="o", markersize=4)
    axes.set_box_aspect((1, 1, 1), zoom=1.1)
    axes.set_facecolor("none")
    for axis, label in zip((axes.xaxis, axes.yaxis, axes.zaxis), panel.labels, strict=True):
        axis.set_ticklabels([])
        axis.set_label_text(label)
        axis.labelpad = -8
        axis.set_pane_color((0, 0, 0, 0))
        axis.line.set_color(PAPER["muted"])
        axis._axinfo["grid"]["color"] = PAPER["line"]


@dataclass(frozen=True)
class HeatMap:
    """Numbers as colours.

    Attributes:
        title: Above the panel.
        values: `[rows, columns]`; NaN where nothing is.
        x_label: Of the columns, with the unit.
        y_label: Of the rows, with the unit.
        limits: The numbers of the darkest and the brightest colour; the smallest and the largest
            value unless given.
        unit: What the colours mean, beside their bar.
        trained: Tokens of pretraining on both axes, to outline; None for no outline.
        ticks: Names of rows and columns, if they have names.
    """

    title: str
    values: torch.Tensor
    x_label: str
    y_label: str
    limits: tuple[float, float] | None = None
    unit: str = "value"
    trained: int | None = None
    ticks: Sequence[str] = ()


@dataclass(frozen=True)
class Curve:
    """A line of points.

    Attributes:
        label: In the legend.
        x: `[N]`.
        y: `[N]`; NaN where the line breaks.
        marked: Whether points are marked and not joined.
    """

    label: str
    x: torch.Tensor
    y: torch.Tensor
    marked: bool = False


@dataclass(frozen=True)
class Curves:
    """Curves over one axis, told apart by colour and by dashes.

    Attributes:
        title: Above the panel.
        curves: The lines.
        x_label: With the unit.
        y_label: With the unit.
        y_log: Whether y is logarithmic.
        bounds: Positions on x to mark, with their names.
        equal: Whether a unit is as long on both axes.
        y_limits: The ends of the y axis, if some values may lie beyond.
    """

    title: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    y_log: bool = False
    bounds: dict[str, float] = field(default_factory=dict)
    equal: bool = False
    y_limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Dial:
    """A hand on a circle.

    Attributes:
        title: Below the dial.
        angle: Of the hand, in radians, counted from the right against the clock.
        trained_arc: The angles that training has seen, from 0 on, in radians; at most 2 pi.
    """

    title: str
    angle: float
    trained_arc: float


@dataclass(frozen=True)
class Dials:
    """Dials side by side."""

    title: str
    dials: Sequence[Dial]


@dataclass(frozen=True)
class Path:
    """A walk in three dimensions.

    Attributes:
        title: Above the panel.
        points: `[N, 3]`.
        labels: Of the three axes.
    """

    title: str
    points: torch.Tensor
    labels: tuple[str, str, str]


Panel = HeatMap | Curves | Dials | Path


@dataclass(frozen=True)
class Picture:
    """Panels with a caption that says what to see in them.

    Attributes:
        panels: What is drawn, row by row.
        caption: Below the panels.
        columns: Panels in a row; all of them unless given.
    """

    panels: Sequence[Panel]
    caption: str
    columns: int | None = None
