"""Names to methods. Each method's file registers itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from rope_patch.methods.base import Method

_REGISTRY: dict[str, type[Method]] = {}
_M = TypeVar("_M", bound=type[Method])


def register(name: str, *, paper: str, training: str) -> Callable[[_M], _M]:
    """Class decorator that puts a method under `name`.

    Args:
        name: What users write.
        paper: Where the formula comes from.
        training: Whether the method needs fine-tuning to work well.
    """

    def decorate(cls: _M) -> _M:
        if name in _REGISTRY:
            raise ValueError(f"method {name!r} is registered twice")
        cls.name, cls.paper, cls.training = name, paper, training
        _REGISTRY[name] = cls
        return cls

    return decorate


def registered_methods() -> dict[str, type[Method]]:
    """All methods by name, in order of registration."""
    return dict(_REGISTRY)


def get_method(name: str) -> type[Method]:
    """The method of that name.

    Raises:
        ValueError: There is none; names the closest.
        TypeError: Not a name.
    """
    if not isinstance(name, str):
        raise TypeError(f"a method is given by its name, got {name!r}")
    if name not in _REGISTRY:
        raise ValueError(
            f"unknown method {name!r}{_did_you_mean(name, _REGISTRY)}; rope_patch.list_methods() "
            "and `rope-patch methods` list all"
        )
    return _REGISTRY[name]


def build(name: str, **options: Any) -> Method:
    """Makes a method from its name and options.

    Raises:
        ValueError: Unknown name or option (with the closest match), or one that is missing.
        TypeError: A value of the wrong type.
    """
    cls = get_method(name)
    known = {f.name: f for f in fields(cls)}
    for key in options:
        if key not in known:
            raise ValueError(
                f"method {name!r} has no option {key!r}{_did_you_mean(key, known)}; "
                f"its options are: {', '.join(known)}"
            )
    for key, f in known.items():
        if f.default is MISSING and key not in options:
            raise ValueError(f"method {name!r} needs the option {key!r}: {f.metadata['help']}")
    return cls(**options)


def _did_you_mean(word: str, known: Any) -> str:
    close = get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
