"""The kernels as operators, which compiled and exported graphs can hold.

An operator costs a multiple of an autograd function in Python, which a graph does not pay.
"""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.ops.kernels import qk_norm_rope as norm_kernels
from rope_patch.ops.kernels import rope as rope_kernels


@torch.library.custom_op("rope_patch::rope", mutates_args=())
def rope_op(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    turns: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    conjugate: bool,
) -> list[torch.Tensor]:
    """`rope` as an operator."""
    turned = rope_kernels.rope(q, k, positions, turns, sections, interleaved, heads_dim, conjugate)
    return [x for x in turned if x is not None]


@rope_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor | None, *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in (q, k) if x is not None]


def _keep_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, positions, turns, sections, interleaved, heads_dim, conjugate = inputs
    ctx.save_for_backward(positions, turns, sections)
    ctx.settings = (interleaved, heads_dim, not conjugate)


def _turn_back(ctx: Any, grads: list[torch.Tensor | None]) -> Any:
    q, k = (*grads, None)[:2]
    rest = (*ctx.saved_tensors, *ctx.settings)
    if q is None:
        turned: Any = [None, None if k is None else rope_op(k, None, *rest)[0]]
    else:
        turned = [*rope_op(q, k, *rest), None][:2]
    return *turned, None, None, None, None, None, None


rope_op.register_autograd(_turn_back, setup_context=_keep_rope)


@torch.library.custom_op("rope_patch::qk_norm_rope", mutates_args=())
def qk_norm_rope_op(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qk_norm_rope` as an operator; the reciprocal norms follow what is wanted."""
    return norm_kernels.forward(
        q, k, q_weight, k_weight, positions, turns, sections, eps, offset, interleaved, heads_dim,
        True,
    )  # fmt: skip


@qk_norm_rope_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    heads_dim, across = rest[-1], q_weight.ndim == 2
    q_rstd, k_rstd = (norm_kernels.empty_rstd(x, heads_dim, across) for x in (q, k))
    return torch.empty_like(q), torch.empty_like(k), q_rstd, k_rstd


@torch.library.custom_op("rope_patch::qk_norm_rope_backward", mutates_args=())
def qk_norm_rope_backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    q_grad: torch.Tensor,
    k_grad: torch.Tensor,
    positions: torch.Tensor,
    turns: torch.Tensor,
    sections: torch.Tensor | None,
    offset: float,
    interleaved: bool,
    heads_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `qk_norm_rope` as an operator."""
    dq, dk, dq_weight, dk_weight = norm_kernels.backward(
        q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, positions, turns, sections,
        offset, interleaved, heads_dim, False,
    )  # fmt: skip
    # Both may be parts of one sum, and what an operator returns must not share memory.
    return dq, dk, dq_weight.clone(), dk_weight.clone()


@qk_norm_rope_backward_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = [torch.empty_like(x) for x in (q, k, q_weight, k_weight)]
    return made[0], made[1], made[2], made[3]


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, positions, turns, sections, _, *settings = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:], positions, turns, sections)
    ctx.settings = settings


def _norm_back(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor, *_: Any) -> Any:
    *tensors, positions, turns, sections = ctx.saved_tensors
    q, k = tensors[:2]
    q_grad = torch.zeros_like(q) if q_grad is None else q_grad
    k_grad = torch.zeros_like(k) if k_grad is None else k_grad
    grads = qk_norm_rope_backward_op(
        *tensors, q_grad, k_grad, positions, turns, sections, *ctx.settings
    )
    return *grads, None, None, None, None, None, None, None


qk_norm_rope_op.register_autograd(_norm_back, setup_context=_keep_norm)
