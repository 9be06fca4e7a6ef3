"""The request to extend a model's context: `Extension`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from rope_patch.methods.base import Method, require_number, require_tokens
from rope_patch.methods.registry import build, get_method
from rope_patch.units import MOST_TIMES, parse_tokens, split_target
from rope_patch.utils.errors import Refused, did_you_mean


@dataclass(frozen=True)
class Extension:
    """A request to extend a model's context, as `rope_patch.patch` takes it.

    Plain data that knows no model: `patch` and `load` check it against one. Two requests with equal
    fields are equal. Texts such as `4x` and `32k` become numbers (`rope_patch.units`).

    Attributes:
        method: A name from `rope_patch.list_methods()`.
        factor: Target length / trained length. Exactly one of `factor` and `length`; dynamic
            methods and `nope` need neither.
        length: Target length in tokens; for dynamic methods the largest one expected.
        trained_length: Tokens of pretraining, if the config states them wrongly.
        layer_types: Which layers to change; None for all but the sliding-window ones.
        start: The frequencies to stretch, if the config scales its rotation: "auto", "unscaled" or
            "running"; see `rope_patch.patch`.
        kernels: Which code applies the rotation: "auto", "reference", "triton" or "hf".
        anyway: Whether lengths beyond `MOST_TIMES` times the trained one are meant. A permission,
            and no part of what is asked for: requests that differ in it alone are equal.
        options: The method's options.

    Raises:
        ValueError: An option has the name of one of the other fields.
    """

    method: str
    _: KW_ONLY
    factor: float | None = None
    length: int | None = None
    trained_length: int | None = None
    layer_types: Sequence[str] | None = None
    start: str = "auto"
    kernels: str = "auto"
    anyway: bool = field(default=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.layer_types, list):
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if not isinstance(self.options, Mapping):
            raise TypeError(
                "options must be a dictionary, such as {'beta_fast': 16}, got "
                f"{type(self.options).__name__}"
            )
        object.__setattr__(self, "options", dict(self.options))
        if any(isinstance(x, str) for x in (self.factor, self.length, self.trained_length)):
            factor, length = split_target(self.factor, self.length)
            trained = parse_tokens("trained_length", self.trained_length)
            vars(self).update(factor=factor, length=length, trained_length=trained)
        if shadows := [name for name in _KEYWORDS if name in self.options]:
            raise Refused(
                f"{shadows[0]} is a field of Extension, not an option of a method: write "
                f"Extension({self.method!r}, {shadows[0]}={self.options[shadows[0]]!r})"
            )

    @classmethod
    def of(cls, method: str | Extension, **arguments: Any) -> Extension:
        """Return the request that the arguments of `rope_patch.patch` make.

        Args:
            method: A method's name, or a whole request, which is returned as it is.
            **arguments: Fields by name; all others are the method's options.

        Raises:
            ValueError: A request and arguments other than the defaults.
        """
        own = {name: arguments.pop(name) for name in _KEYWORDS if name in arguments}
        if not isinstance(method, Extension):
            return cls(method, **own, options=arguments)
        if extra := cls(method.method, **own, options=arguments).arguments():
            raise Refused(
                f"an Extension is a whole request, got {', '.join(extra)} beside it: put all into "
                "it, for example with dataclasses.replace"
            )
        return method

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Extension:
        """Return the request of a dictionary, such as `to_dict` returns.

        Args:
            data: Fields by name; those that are missing have their defaults.

        Raises:
            ValueError: A name is none of a field (names the closest one), or there is no method.
        """
        names = [f.name for f in fields(cls)]
        for name in data:
            if name not in names:
                raise Refused(
                    f"an extension has no field {name!r}{did_you_mean(name, names)}; its fields "
                    f"are: {', '.join(names)}"
                )
        if "method" not in data:
            raise Refused("an extension needs a method; rope_patch.list_methods() lists them")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON; `from_dict` reads it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(self.layer_types, tuple):
            values["layer_types"] = list(self.layer_types)
        return values | {"options": dict(self.options)}

    def arguments(self) -> dict[str, Any]:
        """Return what differs from the defaults, as keyword arguments of `rope_patch.patch`."""
        values = {
            name: value
            for name, value in self.to_dict().items()
            if name in _KEYWORDS and value is not None and value != _KEYWORDS[name]
        }
        return values | dict(self.options)

    def resolve(self, trained_length: int) -> tuple[Method, int | None]:
        """Return the method with its options, and the target length.

        A dynamic method needs neither factor nor length. The length is then the largest one
        expected. The factor is another way to give it, unless it is part of the method's formula
        (`dynamic`).

        Args:
            trained_length: The length that the extension starts from, in tokens.

        Returns:
            The method, and the target length in tokens or None.

        Raises:
            ValueError: Not exactly one of factor and length, where that is needed; or the method
                or one of its options is unknown or out of range.
            TypeError: A value of the wrong type.
        """
        method_class = get_method(self.method)
        factor, length, options = self.factor, self.length, dict(self.options)
        if not method_class.is_dynamic:
            factor, length = resolve_factor_and_length(
                factor, length, trained_length, anyway=self.anyway
            )
            return build(self.method, factor=factor, **options), length
        if method_class.factor_is_option and factor is not None:
            require_number("factor", factor)
            options = {"factor": float(factor), **options}
            factor = None if length is not None or factor <= 1 else factor
        if factor is None and length is None:
            return build(self.method, **options), None
        factor, length = resolve_factor_and_length(
            factor, length, trained_length, anyway=self.anyway
        )
        if factor < 1:
            raise Refused(
                f"factor must be at least 1 (largest length / trained length), got {factor}"
            )
        return build(self.method, **options), length


_KEYWORDS = {f.name: f.default for f in fields(Extension) if f.name not in ("method", "options")}


def resolve_factor_and_length(
    factor: float | None, length: int | None, trained_length: int, *, anyway: bool = False
) -> tuple[float, int]:
    """Return factor and target length (tokens) from exactly one of them, or raise ValueError.

    Args:
        factor: Target length / trained length.
        length: Target length in tokens.
        trained_length: The length that the extension starts from, in tokens.
        anyway: See `require_near`.
    """
    if (factor is None) == (length is None):
        got = "neither" if factor is None else f"factor={factor} and length={length}"
        raise Refused(
            f"expected exactly one of factor and length, got {got}; for example factor=4, or "
            f"length={4 * trained_length}"
        )
    if factor is not None:
        require_number("factor", factor)
        if not factor * trained_length < 2**63:  # NaN, too
            raise Refused(f"factor must be a ratio of two lengths in tokens, got {factor:g}")
        require_near(factor * trained_length, trained_length, anyway)
        return float(factor), round(factor * trained_length)
    require_tokens("length", length)
    assert length is not None
    if length < trained_length:
        raise Refused(
            f"length must be at least the trained length, {trained_length:,} tokens, got {length:,}"
        )
    require_near(length, trained_length, anyway)
    return length / trained_length, int(length)


def is_far(length: float, trained_length: int) -> bool:
    """Return whether a target length is so many times the trained one that it is doubted."""
    return length > MOST_TIMES * trained_length


def require_near(length: float, trained_length: int, anyway: bool) -> None:
    """Raise if a target length is beyond `MOST_TIMES` times the trained one, in tokens.

    Args:
        length: The target length.
        trained_length: The length that the extension starts from.
        anyway: Whether such a length is meant.

    Raises:
        ValueError: It is beyond, and nothing says that it is meant.
    """
    if is_far(length, trained_length) and not anyway:
        raise Refused(
            f"{length:,.0f} tokens are more than {MOST_TIMES} times the trained length, "
            f"{trained_length:,} tokens: expected at most {MOST_TIMES * trained_length:,}. Beyond "
            "that a number is mostly a slip (a length given as a factor, a wrong trained length); "
            "if it is meant, add anyway=True (--anyway)"
        )
