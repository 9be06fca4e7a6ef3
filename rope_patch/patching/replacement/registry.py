"""Registry of the encodings that `rope_patch.encode` knows; each registers itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from rope_patch.patching.replacement.encoding import DecoderShape, Encoding
from rope_patch.utils.errors import Refused, did_you_mean

_E = TypeVar("_E", bound=Encoding)
_REGISTRY: dict[str, type[Encoding]] = {}
_MODULES = ("tables", "biases", "rotations")


def register_encoding(name: str) -> Callable[[type[_E]], type[_E]]:
    """Return a decorator that makes an encoding known by a name.

    Raises:
        ValueError: Another class has the name.
    """

    def decorate(cls: type[_E]) -> type[_E]:
        other = _REGISTRY.get(name)
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise Refused(
                f"register_encoding: {name!r} is taken by {other.__qualname__}; give "
                f"{cls.__qualname__} another name"
            )
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def list_encodings() -> list[str]:
    """Return the names that `rope_patch.encode` takes."""
    for module in _MODULES:
        import_module(f"rope_patch.patching.replacement.{module}")
    return sorted(_REGISTRY)


def build_encoding(
    name: str, shape: DecoderShape, options: dict[str, Any]
) -> tuple[Encoding, dict[str, Any]]:
    """Build an encoding from its name and options.

    Returns:
        The encoding, and all its options with their values.

    Raises:
        ValueError: The name or an option is unknown or out of range.
    """
    names = list_encodings()
    if name not in names:
        raise Refused(
            f"unknown encoding {name!r}{did_you_mean(name, names, 0.5)}: expected one of "
            f"{', '.join(names)}"
        )
    cls = _REGISTRY[name]
    parameters = inspect.signature(cls.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in defaults:
            known = f"its options are: {', '.join(defaults)}" if defaults else "it has none"
            raise Refused(
                f"encoding {name!r} has no option {key!r}{did_you_mean(key, defaults, 0.5)}; "
                f"{known}"
            )
    values = {**defaults, **options}
    factory: Any = cls
    return factory(shape, **values), values
