"""Sums of a loss's terms over all tokens, whose logits exist a few hundred tokens at a time.

The gradients are computed in the forward pass, while a chunk's logits exist, and multiplied by the
loss's own gradient in the backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rope_patch.ops.modes import require_first_order

IGNORED = -100  # the target of a token without a loss
LogitTransform = Callable[[torch.Tensor], torch.Tensor]


def unchanged(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as they are: the transform of most models."""
    return logits


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


MIN_CHUNK = 128  # tokens; smaller products with the head are slow
# Function of a chunk: its sum over the tokens that have a target.
ChunkTotal = Callable[[Chunk], torch.Tensor]
COPIES = 5  # float32 tensors like a chunk's logits: logits, softmax, a product, and two gradients


def chunk_length(tokens: int, hidden: int, vocab: int, copies: int = COPIES) -> int:
    """Return the tokens of a chunk whose temporaries are about as large as the hidden states."""
    ideal = max(1, tokens * hidden // (vocab * copies))
    return min(tokens, max(MIN_CHUNK, 1 << (ideal.bit_length() - 1)))


def chunk_sums(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    terms: Sequence[Term],
    *,
    main: ChunkTotal = cross_entropy,
    transform: LogitTransform = unchanged,
    copies: int = COPIES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies and of all terms, and the terms' own sums.

    Args:
        rows: The head's input, `[N, H]`; the logits, `[N, V]`, without a weight.
        weight: The head's weight, `[V, H]`.
        bias: The head's bias, `[V]`.
        targets: `[N]`.
        terms: The terms beside the cross-entropy.
        main: What is summed in place of the cross-entropy: a function of a chunk.
        transform: What the model does with its head's output before that is its logits.
        copies: Temporaries of a chunk as large as its logits in float32.

    Returns:
        A scalar with a gradient to the first three, and the sums `[terms]` without.
    """
    functions = (main, *(term.total for term in terms))
    return _ChunkSums.apply(rows, weight, bias, targets, functions, transform, copies)


class _ChunkSums(torch.autograd.Function):
    """The sums, and their gradients to rows, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        functions: Sequence[ChunkTotal],
        transform: LogitTransform,
        copies: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the chunks, and compute the gradients."""
        tokens, width = rows.shape
        vocab = width if weight is None else weight.shape[0]
        wide = torch.promote_types(rows.dtype, torch.float32)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.empty_like(rows) if needs_rows else None
        # Chunks add up in float32: in 16 bits small ones would be lost.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        sums = torch.zeros(len(functions), dtype=wide, device=rows.device)
        length = chunk_length(tokens, width, vocab, copies)
        for start in range(0, tokens, length):
            part = slice(start, min(start + length, tokens))
            hidden = rows[part]
            logits = hidden if weight is None else torch.nn.functional.linear(hidden, weight, bias)
            logits = logits.detach().to(wide).requires_grad_()
            with torch.enable_grad():
                chunk = Chunk(transform(logits), targets[part], part)
                parts = torch.stack([function(chunk) for function in functions])
                (gradient,) = torch.autograd.grad(parts.sum(), logits)
            sums += parts.detach()
            del chunk, logits, parts
            gradient = gradient.to(rows.dtype)
            if grad_rows is not None:
                grad_rows[part] = gradient if weight is None else gradient @ weight
            if grad_weight is not None:
                if grad_weight.dtype == gradient.dtype:
                    grad_weight.addmm_(gradient.T, hidden)
                else:
                    grad_weight += gradient.T @ hidden
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
        ctx.gradients = [
            None if gradient is None else (gradient, source.dtype)
            for gradient, source in zip(
                (grad_rows, grad_weight, grad_bias), (rows, weight, bias), strict=True
            )
        ]
        shares = sums[1:].clone()
        ctx.mark_non_differentiable(shares)
        return sums.sum(), shares

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        """Multiply the gradients of the forward pass, in place."""
        require_first_order("the chunked loss", "take the model's own loss")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss has one backward pass: its gradients are used up")
        scaled = [
            None if entry is None else entry[0].mul_(gradient).to(entry[1]) for entry in gradients
        ]
        return *scaled, None, None, None, None
