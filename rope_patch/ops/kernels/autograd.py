"""The kernels as autograd sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rope_patch.ops.kernels import qk_norm_rope as norm_kernels
from rope_patch.ops.kernels import rope as rope_kernels


class Rope(torch.autograd.Function):
    """Rotation; its gradient is the rotation backwards, and so on for higher derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        positions: torch.Tensor,
        turns: torch.Tensor,
        sections: torch.Tensor | None,
        interleaved: bool,
        heads_dim: int,
        conjugate: bool,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(positions, turns, sections)
        ctx.set_materialize_grads(False)
        ctx.settings = (interleaved, heads_dim, not conjugate)
        if inplace:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        return rope_kernels.rope(
            q, k, positions, turns, sections, interleaved, heads_dim, conjugate, inplace
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wanted = [g if n else None for g, n in zip(grads, ctx.needs_input_grad)]  # noqa: B905
        turned = back(*wanted, *ctx.saved_tensors, *ctx.settings)
        return *turned, None, None, None, None, None, None, None


def back(
    q: torch.Tensor | None, k: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rotates what there is of the two gradients, in one launch."""
    if q is None:
        return (None, None) if k is None else (None, Rope.apply(k, None, *rest, False)[0])
    return Rope.apply(q, k, *rest, False)


class QKNormRope(torch.autograd.Function):
    """RMSNorm and rotation of queries and keys; keeps what goes in, or else what comes out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        positions: torch.Tensor,
        turns: torch.Tensor,
        sections: torch.Tensor | None,
        eps: float,
        offset: float,
        interleaved: bool,
        heads_dim: int,
        rederive: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_out, k_out, q_rstd, k_rstd = norm_kernels.forward(
            q, k, q_weight, k_weight, positions, turns, sections, eps, offset, interleaved,
            heads_dim, True,
        )  # fmt: skip
        kept = (q_out, k_out) if rederive else (q, k)
        ctx.save_for_backward(*kept, q_weight, k_weight, q_rstd, k_rstd, positions, turns, sections)
        ctx.settings = (offset, interleaved, heads_dim, rederive)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor) -> Any:
        q, k, q_weight, k_weight, q_rstd, k_rstd, positions, turns, sections = ctx.saved_tensors
        grads = norm_kernels.backward(
            q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, positions, turns, sections,
            *ctx.settings,
        )  # fmt: skip
        wanted = [g if n else None for g, n in zip(grads, ctx.needs_input_grad)]  # noqa: B905
        return *wanted, None, None, None, None, None, None, None, None
