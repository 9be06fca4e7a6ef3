"""Panels of pictures, as plain numbers: heat maps, curves, hands of clocks, walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


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
