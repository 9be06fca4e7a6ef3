"""What a picture shows, as plain numbers: panels of heat maps, curves and hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rope_patch.utils.errors import Refused, did_you_mean


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
    """

    title: str
    values: torch.Tensor
    x_label: str
    y_label: str
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curve:
    """A line of points.

    Attributes:
        label: In the legend.
        x: `[N]`.
        y: `[N]`; NaN where the line breaks.
        dashed: Whether the line is dashed, as for what is not trained.
        marked: Whether points are marked and not joined.
    """

    label: str
    x: torch.Tensor
    y: torch.Tensor
    dashed: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Curves:
    """Curves over one axis.

    Attributes:
        title: Above the panel.
        curves: The lines.
        x_label: With the unit.
        y_label: With the unit.
        y_log: Whether y is logarithmic.
        bounds: Positions on x to mark, with their names.
        equal: Whether a unit is as long on both axes.
    """

    title: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    y_log: bool = False
    bounds: dict[str, float] = field(default_factory=dict)
    equal: bool = False


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
    """A walk in three dimensions, `[N, 3]`."""

    title: str
    points: torch.Tensor


Panel = HeatMap | Curves | Dials | Path


@dataclass(frozen=True)
class Picture:
    """Panels with a caption that says what to see in them."""

    panels: Sequence[Panel]
    caption: str


@dataclass(frozen=True)
class PictureOptions:
    """What can be chosen; each picture uses some of it.

    Attributes:
        encoding: The encoding shown, where a picture shows one of several.
        method: The method that extends, where a picture shows one.
        length: Positions shown, in tokens.
        trained: Trained length in tokens.
        width: Components of an encoding, or of a head.
        heads: Attention heads.
        base: Theta of sinusoids and rotations.
        factor: Target length / trained length.
        position: The position of the hands, in tokens.
    """

    encoding: str = "sinusoidal"
    method: str = "yarn"
    length: int = 128
    trained: int = 64
    width: int = 64
    heads: int = 8
    base: float = 10000.0
    factor: float = 4.0
    position: int = 50

    def __post_init__(self) -> None:
        for name in ("length", "trained", "width", "heads", "position"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise Refused(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.width % 2 or self.width < 6:
            raise Refused(f"width must be an even number of at least 6, got {self.width}")
        if not self.base > 1:
            raise Refused(f"base must be above 1, got {self.base:g}")
        if not self.factor > 1:
            raise Refused(f"factor must be above 1, got {self.factor:g}")


Draw = Callable[[PictureOptions], Picture]
_F = TypeVar("_F", bound=Draw)
PICTURES: dict[str, Draw] = {}


def register_picture(name: str) -> Callable[[_F], _F]:
    """Return a decorator that registers a picture, told of by its docstring's first line."""

    def register(function: _F) -> _F:
        PICTURES[name] = function
        return function

    return register


def get_picture(name: str) -> Draw:
    """Return the function that makes a picture.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in PICTURES:
        raise Refused(
            f"unknown picture {name!r}{did_you_mean(name, PICTURES)}; there are "
            f"{', '.join(PICTURES)}"
        )
    return PICTURES[name]
