"""Registry of methods by name; each method's file registers itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from rope_patch.methods.base import Method
from rope_patch.utils.errors import Refused, did_you_mean

_REGISTRY: dict[str, type[Method]] = {}
_M = TypeVar("_M", bound=type[Method])


def register(name: str, *, paper: str, training: str) -> Callable[[_M], _M]:
    """Return a class decorator that registers a method under `name`.

    Args:
        name: The name that users write.
        paper: Source of the formula.
        training: Whether the method needs fine-tuning to work well.
    """

    def decorate(cls: _M) -> _M:
        if name in _REGISTRY:
            raise Refused(f"method {name!r} is registered twice")
        cls.name, cls.paper, cls.training = name, paper, training
        _REGISTRY[name] = cls
        return cls

    return decorate


def registered_methods() -> dict[str, type[Method]]:
    """Return all methods by name, in order of registration."""
    return dict(_REGISTRY)


def get_method(name: str) -> type[Method]:
    """Return the method class of that name.

    Raises:
        ValueError: The name is unknown; names the closest one.
        TypeError: The name is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a method is given by its name, got {name!r}")
    if name not in _REGISTRY:
        raise Refused(
            f"unknown method {name!r}{did_you_mean(name, _REGISTRY, 0.5)}; "
            "rope_patch.list_methods() and `rope-patch methods` list all"
        )
    return _REGISTRY[name]


def build(name: str, **options: Any) -> Method:
    """Build a method from its name and options.

    Raises:
        ValueError: The name or an option is unknown (names the closest match), or one is missing.
        TypeError: A value has the wrong type.
    """
    cls = get_method(name)
    option_fields = {f.name: f for f in fields(cls)}
    for key in options:
        if key not in option_fields:
            raise Refused(
                f"method {name!r} has no option {key!r}{did_you_mean(key, option_fields, 0.5)}; "
                f"its options are: {', '.join(option_fields)}"
            )
    for key, f in option_fields.items():
        if f.default is MISSING and key not in options:
            raise Refused(f"method {name!r} needs the option {key!r}: {f.metadata['help']}")
    return cls(**options)
