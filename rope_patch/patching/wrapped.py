"""A method around another one, which to its user is still that other one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.methods import Method


@dataclass(frozen=True, kw_only=True)
class Wrapped(Method):
    """Named, described and saved as what is within; subclasses say what they do to its rotation.

    Attributes:
        inner: The method within.
    """

    inner: Method

    def __post_init__(self) -> None:
        # What describes a method's class describes this one, too.
        for name in ("name", "paper", "training", "grows", "factor_in_formula", "factor"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def native(self) -> bool:
        return self.inner.native

    @property
    def kept_tokens(self) -> int:
        return self.inner.kept_tokens

    def reach(self, length: float, trained_length: int) -> float:
        return self.inner.reach(length, trained_length)

    def options(self) -> dict[str, Any]:
        return self.inner.options()

    def __str__(self) -> str:
        return str(self.inner)
