"""Sums over tokens that are functions of their logits, a chunk of tokens at a time.

Logits and their gradient are the largest tensors of a long training step. They are computed for a
chunk, reduced to the gradients of hidden states and head, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

CHUNK_NUMBERS = 2**26  # logits of a chunk: 256 MiB in float32

# (logits [n, V], at least float32; the chunk's tokens) -> sum over these tokens
Term = Callable[[torch.Tensor, slice], torch.Tensor]


def chunked_sum(
    term: Term,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    size: int | None = None,
) -> torch.Tensor:
    """Return the sum of a term over all tokens, differentiable once.

    The gradients are computed in the forward pass, so that each chunk's logits are made once.

    Args:
        term: Function of a chunk's logits.
        hidden: The head's inputs, `[N, H]`.
        weight: The head's weight, `[V, H]`, of the same dtype.
        bias: The head's bias, `[V]`, or None.
        size: Tokens of a chunk; None for as many as have `CHUNK_NUMBERS` logits.
    """
    size = size or max(1, CHUNK_NUMBERS // len(weight))
    total: torch.Tensor = _ChunkedSum.apply(hidden, weight, bias, term, size)  # type: ignore[no-untyped-call]
    return total


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32, or as it is if its dtype is wider."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        term: Term,
        size: int,
    ) -> torch.Tensor:
        sums = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = hidden.new_zeros((), dtype=sums)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if for_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=sums) if for_weight else None
        bias_grad = torch.zeros_like(bias, dtype=sums) if bias is not None and for_bias else None
        for start in range(0, len(hidden), size):
            tokens = slice(start, start + size)
            chunk = hidden[tokens]
            with torch.enable_grad():
                logits = widen(functional.linear(chunk, weight, bias).detach()).requires_grad_()
                part = term(logits, tokens)
                total += part.detach()
                if not any(ctx.needs_input_grad):
                    continue
                (gradient,) = torch.autograd.grad(part, logits)
            del logits, part
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[tokens] = gradient @ weight
            if weight_grad is not None:
                weight_grad += gradient.T @ chunk
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (
            None if saved is None else (saved * gradient).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None)
