"""A place in a model where positions enter, and which methods extend it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.patching.undo_log import UndoLog


@dataclass(frozen=True)
class Stretch:
    """How far a site is extended.

    Attributes:
        method: The method's name.
        trained_length: Tokens of pretraining.
        length: Target length in tokens; None where the method follows the text.
        exact: Whether ALiBi's biases are built from distances; None where it helps.
    """

    method: str
    trained_length: int
    length: int | None
    exact: bool | None = None

    @property
    def factor(self) -> float:
        """Return target length / trained length; 1 without a target."""
        return 1.0 if self.length is None else self.length / self.trained_length

    @property
    def is_dynamic(self) -> bool:
        """Return whether the factor follows the text."""
        return self.method.startswith("dynamic-")

    @property
    def formula(self) -> str:
        """Return the method's name without `dynamic-`."""
        return self.method.removeprefix("dynamic-")

    def factor_at(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the factor of a dynamic method for a text, at least 1, a tensor of one number.

        Args:
            tokens: The text's length, a tensor of one number, so that no device is waited for.
        """
        return (tokens.double() / self.trained_length).clamp(min=1)


@dataclass(frozen=True, eq=False)
class Site(ABC):
    """A place in a model where positions enter.

    Attributes:
        name: Its module's name in the model.
        module: Its module.
    """

    kind: ClassVar[str]  # for people
    methods: ClassVar[tuple[str, ...]]
    reads_slots: ClassVar[bool] = False  # distances are counted in slots of the cache

    name: str
    module: nn.Module

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options that its methods have."""
        return ()

    @property
    def part(self) -> str:
        """Return "encoder" or "decoder"."""
        parts = self.name.split(".")
        return "encoder" if any(f"_{part}".endswith("_encoder") for part in parts) else "decoder"

    @abstractmethod
    def trained_length(self, config: Any) -> int | None:
        """Return the tokens of pretraining that the config states; None if it does not."""

    @abstractmethod
    def changes(self, stretch: Stretch) -> bool:
        """Return whether a stretch would change anything."""

    def config_fields(self, config: Any, stretch: Stretch) -> dict[str, int]:
        """Return the fields of the config that the stretch sets, with their new values."""
        return {}

    @abstractmethod
    def describe(self, stretch: Stretch) -> str:
        """Return what the stretch does, in one line for the summary."""

    @abstractmethod
    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Change the model."""
