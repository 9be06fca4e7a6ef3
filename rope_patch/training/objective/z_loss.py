"""z-loss: keep the softmax's denominator Z near 1, so that logits do not drift."""

from __future__ import annotations

import torch

from rope_patch.training.objective.terms import Chunk, Term


class ZLoss(Term):
    """coefficient × (log Z)², the mean over all targets.

    Source: PaLM, arXiv:2204.02311, section 5 (with 1e-4); Olmo 3, arXiv:2512.13961, table 35 (with
    1e-5).

    Args:
        coefficient: The weight of the term.
    """

    name = "z_loss"

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def total(self, chunk: Chunk) -> torch.Tensor:
        """Return the weighted sum of squares; see `Term`."""
        return self.coefficient * chunk.sum_counted(chunk.log_normalizer.square())
