"""The pictures by name, and the options that each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rope_patch.pictures.renderer import Picture
from rope_patch.transformers_api.remote_code import remote_code
from rope_patch.units import parse_factor, parse_tokens
from rope_patch.utils.errors import Refused, did_you_mean

_COUNTS = ("length", "trained", "width", "heads", "position")


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """What can be chosen; each picture takes some of it.

    Attributes:
        encoding: The encoding shown, where a picture shows one of several.
        model: A live model, a folder, a name on the Hub, or "demo", whose own numbers are shown.
        method: The method that extends, where a picture shows one.
        length: Positions shown, in tokens.
        trained: Trained length in tokens.
        width: Components of an encoding, or of a head.
        heads: Attention heads.
        base: Theta of sinusoids and rotations.
        factor: Target length / trained length.
        position: The position of the hands, in tokens.
        given: Names of the options that the caller chose.
    """

    encoding: str | None = None
    model: Any = None
    method: str | None = None
    length: int = 128
    trained: int = 64
    width: int = 64
    heads: int = 8
    base: float = 10000.0
    factor: float = 4.0
    position: int = 50
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", parse_factor("factor", self.factor))
        for name in ("length", "trained", "position"):
            object.__setattr__(self, name, parse_tokens(name, getattr(self, name)))
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise Refused(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.width % 2 or self.width < 6:
            raise Refused(f"width must be an even number of at least 6, got {self.width}")
        if not self.base > 1:
            raise Refused(f"base must be above 1, got {self.base:g}")
        if not self.factor > 1:
            raise Refused(f"factor must be above 1, got {self.factor:g}")

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Raise if one of these options was chosen, because it would change nothing.

        Args:
            names: Options.
            reason: Why none of them acts.

        Raises:
            ValueError: One of them was chosen.
        """
        for name in names:
            if name in self.given:
                raise Refused(f"{name} must be left out, because it would change nothing: {reason}")


Draw = Callable[[PictureOptions], Picture]
_F = TypeVar("_F", bound=Draw)


@dataclass(frozen=True)
class PictureKind:
    """A picture that can be drawn.

    Attributes:
        draw: Makes it.
        options: The options that it takes, with its defaults.
    """

    draw: Draw
    options: dict[str, Any]

    @property
    def about(self) -> str:
        """Return what it shows, in a line."""
        return (self.draw.__doc__ or "").splitlines()[0]


PICTURES: dict[str, PictureKind] = {}


def register_picture(name: str, **options: Any) -> Callable[[_F], _F]:
    """Return a decorator that registers a picture, told of by its docstring's first line.

    Args:
        name: The picture's name.
        **options: The options that it takes, with its defaults.
    """

    def register(function: _F) -> _F:
        PICTURES[name] = PictureKind(function, options)
        return function

    return register


def get_picture(name: str) -> PictureKind:
    """Return the picture of a name.

    Raises:
        ValueError: There is none.
    """
    if name not in PICTURES:
        raise Refused(
            f"unknown picture {name!r}{did_you_mean(name, PICTURES)}; there are "
            f"{', '.join(PICTURES)}"
        )
    return PICTURES[name]


def make_picture(name: str, *, trust_remote_code: bool = False, **given: Any) -> Picture:
    """Return the numbers of a picture.

    Args:
        name: One of `PICTURES`.
        trust_remote_code: Whether to execute Python code that the model's checkpoint brings.
        **given: Fields of `PictureOptions` that the picture takes.

    Raises:
        ValueError: There is no such picture, or it does not take such an option or value.
        TypeError: There is no such option.
    """
    kind = get_picture(name)
    options = PictureOptions(**kind.options | given, given=frozenset(given))
    for key in given:
        if key not in kind.options:
            takes = ", ".join(kind.options)
            raise Refused(f"{key} must be left out: the picture {name!r} takes {takes}")
    with remote_code(options.model, trust_remote_code):
        return kind.draw(options)
