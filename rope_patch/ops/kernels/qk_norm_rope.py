"""The op `qk_norm_rope`: queries and keys normed and rotated, in one launch each way.

From the inside out: the launches of the kernels in `qk_norm_rope_kernels.py`, the autograd function
for eager mode, and the custom ops for compiled and exported graphs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from rope_patch.ops.kernels.launcher import (
    Launcher,
    LaunchSpec,
    head_splits,
    position_strides,
    row_stride,
    strides,
    tile_sizes,
)
from rope_patch.ops.kernels.qk_norm_rope_kernels import backward_kernel, forward_kernel
from rope_patch.ops.validation import validate_shapes

# Programs of the backward pass: enough to fill a large GPU, and few enough that the partial weight
# gradients, one set for each program, stay small beside the keys. The number is the same on every
# device, so sums are taken in the same order.
_PROGRAMS = 2048

# The same where one program holds all heads of a token, with as many weights, in 8 warps.
_PROGRAMS_ALL_HEADS = 512
_WARPS_ALL_HEADS = 8

# -- launches --------------------------------------------------------------------------------------

_forward_launcher = Launcher(forward_kernel)
_backward_launcher = Launcher(backward_kernel)


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    eps: float,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward kernel; its results equal `rope_patch.ops.reference.qk_norm_rope`.

    Returns:
        Queries and keys, and if `save`, the reciprocal norms of both in float32: `[B, S, H]`, or
        `[B, S]` where heads are normed together.
    """
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if save:
        q_rstd, k_rstd = (_empty_rstd(x, heads_dim, q_weight.ndim == 2) for x in (q, k))
    else:
        q_rstd, k_rstd = q_weight, k_weight  # the kernel does not write to these pointers
    axes = packed_freqs if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, q_weight.dtype, k_weight.dtype,
        q_weight.shape, q_weight.stride(), k_weight.shape, k_weight.stride(),
        positions.shape, positions.stride(), positions.dtype,
        packed_freqs.shape, packed_freqs.stride(), packed_freqs.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device, k.device, q_weight.device, k_weight.device, positions.device, packed_freqs.device,
        eps, offset, interleaved, heads_dim, save,
    )  # fmt: skip

    if q.numel() or k.numel():
        address_bits = q.data_ptr() | k.data_ptr() | q_weight.data_ptr() | k_weight.data_ptr()
        tensors = (
            q, k, q_weight, k_weight, q_out, k_out, q_rstd, k_rstd, positions, packed_freqs, axes,
        )  # fmt: skip
        settings = (eps, offset, interleaved, heads_dim, save)
        _forward_launcher(
            key, tensors, address_bits, _make_forward_spec, tensors, sections, settings
        )
    return q_out, k_out, q_rstd, k_rstd


def launch_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    q_grad: torch.Tensor,
    k_grad: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    recompute_input: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and both weights.

    Args:
        q: The op's input; its output if `recompute_input`.
        k: The same.
    """
    norm_all_heads = q_weight.ndim == 2
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    tokens = q.shape[0] * q.shape[3 - heads_dim]
    partial_sums = torch.empty(
        min(tokens, _PROGRAMS_ALL_HEADS if norm_all_heads else _PROGRAMS),
        q_weight.numel() + k_weight.numel(),
        device=q.device,
        dtype=torch.float32,
    )
    axes = packed_freqs if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, q_weight.dtype, k_weight.dtype,
        q_grad.stride(), q_grad.dtype, k_grad.stride(), k_grad.dtype,
        q_weight.shape, q_weight.stride(), k_weight.shape, k_weight.stride(),
        positions.shape, positions.stride(), positions.dtype,
        packed_freqs.shape, packed_freqs.stride(), packed_freqs.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device, offset, interleaved, heads_dim, recompute_input,
    )  # fmt: skip

    if tokens:
        address_bits = (
            q.data_ptr() | k.data_ptr() | q_weight.data_ptr() | k_weight.data_ptr()
            | q_grad.data_ptr() | k_grad.data_ptr()
        )  # fmt: skip
        tensors = (
            q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, q_out, k_out, partial_sums,
            positions, packed_freqs, axes,
        )  # fmt: skip
        settings = (offset, interleaved, heads_dim, recompute_input)
        _backward_launcher(
            key, tensors, address_bits, _make_backward_spec, tensors, sections, settings
        )
    q_sum, k_sum = partial_sums.sum(0).split([q_weight.numel(), k_weight.numel()])
    return (
        q_out,
        k_out,
        q_sum.view_as(q_weight).to(q_weight.dtype),
        k_sum.view_as(k_weight).to(k_weight.dtype),
    )


def _empty_rstd(x: torch.Tensor, heads_dim: int, norm_all_heads: bool) -> torch.Tensor:
    """Allocate the reciprocal norms of x: `[B, S]` if `norm_all_heads`, else `[B, S, H]`."""
    shape = (x.shape[0], x.shape[3 - heads_dim], *(() if norm_all_heads else (x.shape[heads_dim],)))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _make_forward_spec(
    tensors: tuple[torch.Tensor, ...], sections: torch.Tensor | None, settings: tuple[Any, ...]
) -> LaunchSpec:
    q, k, q_weight, k_weight, q_out, k_out, _, _, positions, packed_freqs, _ = tensors
    eps, offset, interleaved, heads_dim, save = settings
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, q_weight, k_weight)
    norm_all_heads, tokens = q_weight.ndim == 2, q.shape[0] * q.shape[3 - heads_dim]
    constexprs = _make_constexprs(
        q, k, packed_freqs, sections, offset, interleaved, heads_dim, norm_all_heads
    )
    max_heads = max(q.shape[heads_dim], k.shape[heads_dim])
    return LaunchSpec(
        (tokens, 1 if norm_all_heads else head_splits(tokens, max_heads, constexprs["HEADS"]), 1),
        (eps, *_scalar_args((q, k, q_out, k_out), positions, packed_freqs, heads_dim)),
        {**constexprs, "SAVE": save},
        _WARPS_ALL_HEADS if norm_all_heads else 1,
    )


def _make_backward_spec(
    tensors: tuple[torch.Tensor, ...], sections: torch.Tensor | None, settings: tuple[Any, ...]
) -> LaunchSpec:
    (
        q, k, q_weight, _, _, _, q_grad, k_grad, q_out, k_out, partial_sums, positions,
        packed_freqs, _,
    ) = tensors  # fmt: skip
    offset, interleaved, heads_dim, recompute_input = settings
    norm_all_heads, tokens = q_weight.ndim == 2, q.shape[0] * q.shape[3 - heads_dim]
    constexprs = _make_constexprs(
        q, k, packed_freqs, sections, offset, interleaved, heads_dim, norm_all_heads
    )
    if not norm_all_heads:  # half a tile, because two tiles and the sums must fit into registers
        constexprs["HEADS"] = max(constexprs["HEADS"] // 2, 1)
    scalars = _scalar_args((q, k, q_grad, k_grad, q_out, k_out), positions, packed_freqs, heads_dim)
    return LaunchSpec(
        (len(partial_sums), 2, 1),
        (tokens, *scalars),
        {**constexprs, "RECOMPUTE_INPUT": recompute_input},
        _WARPS_ALL_HEADS if norm_all_heads else 1,
    )


def _make_constexprs(
    q: torch.Tensor,
    k: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    norm_all_heads: bool,
) -> dict[str, Any]:
    max_heads = max(q.shape[heads_dim], k.shape[heads_dim])
    rotary_dim = 2 * (packed_freqs.shape[-1] - 1)
    sizes: dict[str, Any] = dict(tile_sizes(q.shape[-1], rotary_dim, max_heads))
    if norm_all_heads:
        sizes["HEADS"] = triton.next_power_of_2(max_heads)
    return {
        **sizes,
        "INTERLEAVED": interleaved,
        "SECTIONS": sections is not None,
        "OFFSET": offset,
        "NORM_ALL_HEADS": norm_all_heads,
    }


def _scalar_args(
    tensors: tuple[torch.Tensor, ...],
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    heads_dim: int,
) -> tuple[int, ...]:
    """Return sizes and strides; `tensors` start with queries and keys."""
    q, k = tensors[:2]
    scalars = [q.shape[3 - heads_dim], q.shape[heads_dim], k.shape[heads_dim]]
    for x in tensors:
        scalars += strides(x, heads_dim)
    return (*scalars, *position_strides(positions), row_stride(packed_freqs))


# -- autograd function, for eager mode -------------------------------------------------------------


class QKNormRopeFunction(torch.autograd.Function):
    """RMSNorm and rotation of queries and keys; saves the input, or the output instead."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        positions: torch.Tensor,
        packed_freqs: torch.Tensor,
        sections: torch.Tensor | None,
        eps: float,
        offset: float,
        interleaved: bool,
        heads_dim: int,
        recompute_input: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_out, k_out, *rstd = launch_forward(
            q, k, q_weight, k_weight, positions, packed_freqs, sections, eps, offset, interleaved,
            heads_dim, True,
        )  # fmt: skip
        saved = (q_out, k_out) if recompute_input else (q, k)
        ctx.save_for_backward(*saved, q_weight, k_weight, *rstd, positions, packed_freqs, sections)
        ctx.settings = (offset, interleaved, heads_dim, recompute_input)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor) -> Any:
        *tensors, positions, packed_freqs, sections = ctx.saved_tensors
        arguments: Any = (*tensors, q_grad, k_grad, positions, packed_freqs, sections)
        grads = launch_backward(*arguments, *ctx.settings)
        needed_grads = [g if n else None for g, n in zip(grads, ctx.needs_input_grad)]  # noqa: B905
        return *needed_grads, None, None, None, None, None, None, None, None


# -- custom ops, for graphs ------------------------------------------------------------------------


@torch.library.custom_op("rope_patch::qk_norm_rope", mutates_args=())
def qk_norm_rope_op(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    eps: float,
    offset: float,
    interleaved: bool,
    heads_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys, normed and rotated, and the reciprocal norms of both."""
    return launch_forward(
        q, k, q_weight, k_weight, positions, packed_freqs, sections, eps, offset, interleaved,
        heads_dim, True,
    )  # fmt: skip


@qk_norm_rope_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    heads_dim, norm_all_heads = rest[-1], q_weight.ndim == 2
    q_rstd, k_rstd = (_empty_rstd(x, heads_dim, norm_all_heads) for x in (q, k))
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
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    offset: float,
    interleaved: bool,
    heads_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `qk_norm_rope`."""
    dq, dk, dq_weight, dk_weight = launch_backward(
        q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, positions, packed_freqs, sections,
        offset, interleaved, heads_dim, False,
    )  # fmt: skip
    # Both may be views of one sum, and outputs of an op must not share memory.
    return dq, dk, dq_weight.clone(), dk_weight.clone()


@qk_norm_rope_backward_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = [torch.empty_like(x) for x in (q, k, q_weight, k_weight)]
    return grads[0], grads[1], grads[2], grads[3]


def _norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, positions, packed_freqs, sections, _, *settings = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:], positions, packed_freqs, sections)
    ctx.settings = settings


def _norm_backward(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor, *_: Any) -> Any:
    *tensors, positions, packed_freqs, sections = ctx.saved_tensors
    q, k = tensors[:2]
    q_grad = torch.zeros_like(q) if q_grad is None else q_grad
    k_grad = torch.zeros_like(k) if k_grad is None else k_grad
    grads = qk_norm_rope_backward_op(
        *tensors, q_grad, k_grad, positions, packed_freqs, sections, *ctx.settings
    )
    return *grads, None, None, None, None, None, None, None


qk_norm_rope_op.register_autograd(_norm_backward, setup_context=_norm_setup_context)
