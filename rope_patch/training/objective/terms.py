"""Terms of a training loss: functions of a chunk of logits and its targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rope_patch.training.objective.distillation import Distillation

IGNORED = -100  # a target without a loss


@dataclass(frozen=True)
class Chunk:
    """Logits of some of a batch's tokens, computed once for all terms.

    Attributes:
        logits: In float32 or float64, as the softmax sees them, `[N, V]`.
        targets: Each token's target, or `IGNORED`, `[N]`.
        rows: Where the tokens lie among those of the batch, `[B * S]`.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    rows: slice

    @cached_property
    def counted(self) -> torch.Tensor:
        """Return which tokens have a target, `[N]`."""
        return self.targets != IGNORED

    @cached_property
    def log_normalizer(self) -> torch.Tensor:
        """Return log Z, the logarithm of the softmax's denominator, `[N]`."""
        return self.logits.logsumexp(-1)

    def sum_counted(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of one value a token, over the tokens that have a target."""
        return torch.where(self.counted, values, 0).sum()


class Term(ABC):
    """A term that a recipe adds to the cross-entropy of its training loss.

    Attributes:
        name: The term's name in logs.
    """

    name: str

    @abstractmethod
    def total(self, chunk: Chunk) -> torch.Tensor:
        """Return the term's weighted sum over a chunk's tokens, with a gradient to its logits.

        The loss function divides it by the number of targets of the whole optimizer step, as it
        divides the cross-entropy. Use `chunk.log_normalizer` rather than a softmax of your own: the
        cross-entropy has computed it.
        """


def cross_entropy(chunk: Chunk) -> torch.Tensor:
    """Return the sum of a chunk's cross-entropies."""
    targets = chunk.targets.where(chunk.counted, 0)
    target_logits = chunk.logits.gather(-1, targets[:, None]).squeeze(-1)
    return chunk.sum_counted(chunk.log_normalizer - target_logits)


class Objective:
    """A recipe's terms beside the cross-entropy, and their values since they were last read.

    Args:
        terms: The terms.
        distillation: What takes the cross-entropy's place in distilled rows, or None.

    Attributes:
        terms: The terms.
        distillation: The distillation.
    """

    def __init__(
        self, terms: Iterable[Term] = (), distillation: Distillation | None = None
    ) -> None:
        self.terms, self.distillation = list(terms), distillation
        self._values: list[torch.Tensor] = []  # per forward pass, [terms]

    def record(self, values: torch.Tensor) -> None:
        """Record each term's share of the loss of one forward pass, `[terms]`."""
        self._values.append(values.detach())

    def read(self, accelerator: Any, reduction: str = "sum") -> dict[str, float]:
        """Return each term's share of a step's loss by name, over all processes, and forget it.

        Args:
            accelerator: accelerate's Accelerator; every process must call this.
            reduction: "sum" if losses are divided by the targets of all processes, "mean" if by
                those of each.
        """
        distilled = {} if self.distillation is None else self.distillation.step_metrics()
        if not self.terms:
            return distilled
        total = torch.stack(self._values).sum(0)
        self._values = []
        values = accelerator.reduce(total, reduction=reduction).tolist()
        shares = {term.name: value for term, value in zip(self.terms, values, strict=True)}
        return shares | distilled
