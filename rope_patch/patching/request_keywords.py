"""Check that all arguments of `patch` but model and method are passed by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def require_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a model and a method: a third positional argument raises.

    Raises:
        TypeError: A third argument is passed by position.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 2:
            raise TypeError(
                f"{function.__name__}() takes a model and a method, and all else by name, got "
                f"{args[2]!r}: write factor={args[2]!r}, or length=... in tokens"
            )
        return function(*args, **kwargs)

    return called
