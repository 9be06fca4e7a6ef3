"""What the lab's tasks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

Batch = tuple[torch.Tensor, torch.Tensor]  # input ids and labels, `[B, S]`; labels of -100 are free
_TOKENS_AT_ONCE = 8192  # of a forward pass in measurements


class Task(ABC):
    """Data to train on, and what is measured on data that no training saw.

    Attributes:
        name: "text" or "recall".
        vocabulary_size: Number of token ids.
    """

    name: ClassVar[str]
    vocabulary_size: int

    @abstractmethod
    def batch(self, generator: torch.Generator, step: int) -> Batch:
        """Return the batch of a step; it depends on the generator's state and the step alone."""

    @abstractmethod
    def tokens(self, step: int) -> int:
        """Return the tokens of a step's batch."""

    @abstractmethod
    def test_tokens(self, length: int) -> int:
        """Return the tokens that one measurement at a length reads."""

    @abstractmethod
    def measure(self, model: Any, length: int) -> dict[str, Any]:
        """Return what a model scores at a length: lists with an entry for each held-out sample.

        Args:
            model: A causal language model in eval mode.
            length: Tokens of each window.
        """


@torch.no_grad()
def read_rows(
    model: Any, input_ids: torch.Tensor, keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return what is kept of each row's logits, reading a part of the rows at once.

    Args:
        model: A causal language model.
        input_ids: The rows, `[B, S]`.
        keep: Gets logits `[rows, S, V]` and their input ids, and returns `[rows, ...]`.
    """
    parts = input_ids.split(max(1, _TOKENS_AT_ONCE // input_ids.shape[1]))
    return torch.cat([keep(model(input_ids=ids, use_cache=False).logits, ids) for ids in parts])


def rounded(values: torch.Tensor) -> Any:
    """Return numbers as nested lists with five decimals, which is far below what samples tell."""
    if values.ndim > 1:
        return [rounded(row) for row in values]
    return [round(value, 5) for value in values.tolist()]
