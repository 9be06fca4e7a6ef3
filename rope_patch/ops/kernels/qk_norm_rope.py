"""The op `qk_norm_rope`: queries and keys normed and rotated, in one launch each way.

From the inside out: the launches of the kernels in `qk_norm_rope_kernels.py`, the autograd function
for eager mode, and the custom ops for compiled and exported graphs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from rope_patch.ops.kernels.launch_choices import apply_choice
from rope_patch.ops.kernels.launcher import (
    Launcher,
    LaunchSpec,
    head_splits,
    position_strides,
    row_stride,
    rows_kind,
    strides,
    tile_sizes,
)
from rope_patch.ops.kernels.qk_norm_rope_kernels import (
    backward_kernel,
    forward_kernel,
    sum_programs,
)
from rope_patch.ops.modes import require_first_order
from rope_patch.ops.validation import validate_shapes

# Programs of the backward pass with gradients of weights: enough to fill a large GPU, and few
# enough that the partial gradients, one set for each program, stay small beside the keys. The
# number is the same on every device, so sums are taken in the same order.
_PROGRAMS = 2048

# Programs of the backward pass without gradients of weights: more hide each other's waiting.
_PROGRAMS_FROZEN = 4096

# Programs of a backward pass where the norm spans all heads, and the warps of each: a program holds
# all heads of a token, and more warps compute the same angles more often.
_PROGRAMS_ALL_HEADS = 512
WARPS_ALL_HEADS = 4

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
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward kernel; its results equal `rope_patch.ops.reference.qk_norm_rope`.

    In place it overwrites q and k: a program reads its heads before it writes them.

    Returns:
        Queries and keys, and if `save`, the reciprocal norms of both in float32: `[B, S, H]`, or
        `[B, S]` where heads are normed together.
    """
    q_out, k_out = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
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
        eps, offset, interleaved, heads_dim, save, inplace,
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
    weights: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of queries, keys and both weights; None for weights unless `weights`.

    Args:
        q: The op's input; its output if `recompute_input`.
        k: The same.
        weights: Whether the weights' gradients are needed, which takes a second launch.
    """
    norm_all_heads = q_weight.ndim == 2
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    tokens = q.shape[0] * q.shape[3 - heads_dim]
    max_heads = max(q.shape[heads_dim], k.shape[heads_dim])
    rotary_dim = 2 * (packed_freqs.shape[-1] - 1)
    programs, shares = _backward_programs(
        tokens, q.shape[-1], rotary_dim, max_heads, norm_all_heads, weights
    )
    numel = q_weight.numel() + k_weight.numel()
    partial_sums = torch.empty(
        programs * shares, numel if weights else 0, device=q.device, dtype=torch.float32
    )
    axes = packed_freqs if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, q_weight.dtype, k_weight.dtype,
        q_grad.stride(), q_grad.dtype, k_grad.stride(), k_grad.dtype,
        q_weight.shape, q_weight.stride(), k_weight.shape, k_weight.stride(),
        positions.shape, positions.stride(), positions.dtype,
        packed_freqs.shape, packed_freqs.stride(), packed_freqs.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device, offset, interleaved, heads_dim, recompute_input, weights,
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
        settings = (offset, interleaved, heads_dim, recompute_input, weights, programs, shares)
        _backward_launcher(
            key, tensors, address_bits, _make_backward_spec, tensors, sections, settings
        )
    if not weights:
        return q_out, k_out, None, None
    return q_out, k_out, *sum_programs(partial_sums, q_weight, k_weight)


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
    constexprs = make_constexprs(
        q, k, packed_freqs, sections, offset, interleaved, heads_dim, norm_all_heads
    )
    heads = (q.shape[heads_dim], k.shape[heads_dim])
    default = head_splits(tokens, heads, constexprs, has_norms=True)
    tiles, warps, stages = apply_choice(
        "qk_norm_rope", q, tokens, heads, heads, constexprs, default
    )
    return LaunchSpec(
        (tokens, tiles, 1),
        (eps, *_scalar_args((q, k, q_out, k_out), positions, packed_freqs, heads_dim)),
        {**constexprs, "SAVE": save, "ONE_TILE": tiles > 1},
        WARPS_ALL_HEADS if norm_all_heads else warps,
        stages,
    )


def _make_backward_spec(
    tensors: tuple[torch.Tensor, ...], sections: torch.Tensor | None, settings: tuple[Any, ...]
) -> LaunchSpec:
    (
        q, k, q_weight, _, _, _, q_grad, k_grad, q_out, k_out, _, positions, packed_freqs, _,
    ) = tensors  # fmt: skip
    offset, interleaved, heads_dim, recompute_input, weights, programs, shares = settings
    norm_all_heads, tokens = q_weight.ndim == 2, q.shape[0] * q.shape[3 - heads_dim]
    constexprs = make_constexprs(
        q, k, packed_freqs, sections, offset, interleaved, heads_dim, norm_all_heads
    )
    if not norm_all_heads:
        constexprs["HEADS"] = _backward_tile_heads(constexprs["HEADS"], weights)
    scalars = _scalar_args((q, k, q_grad, k_grad, q_out, k_out), positions, packed_freqs, heads_dim)
    return LaunchSpec(
        (programs, 2, shares),
        (tokens, *scalars),
        {
            **constexprs,
            "RECOMPUTE_INPUT": recompute_input,
            "WEIGHTS": weights,
            "SHARED": shares > 1,
        },
        WARPS_ALL_HEADS if norm_all_heads else 1,
    )


def _backward_tile_heads(heads: int, weights: bool) -> int:
    """Return half a tile with gradients of weights: two tiles and sums must fit into registers."""
    return max(heads // 2, 1) if weights else heads


@lru_cache(maxsize=1024)
def _backward_programs(
    tokens: int, head_dim: int, rotary_dim: int, heads: int, norm_all_heads: bool, weights: bool
) -> tuple[int, int]:
    """Return numbers of programs for tokens, and of programs that share a token's heads."""
    if norm_all_heads:
        return min(tokens, _PROGRAMS_ALL_HEADS), 1
    most = _PROGRAMS if weights else _PROGRAMS_FROZEN
    programs = min(tokens, most)
    tile_heads = _backward_tile_heads(tile_sizes(head_dim, rotary_dim, heads)["HEADS"], weights)
    return programs, min(triton.cdiv(heads, tile_heads), most // max(programs, 1))


def make_constexprs(
    q: torch.Tensor,
    k: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    norm_all_heads: bool,
) -> dict[str, Any]:
    """Return the constants of a forward or backward kernel with norms."""
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
        "ROWS": rows_kind(q.shape[0], q.shape[3 - heads_dim]),
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
    def backward(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor) -> Any:
        require_first_order("qk_norm_rope in Triton", 'pass kernels="reference"')
        *tensors, positions, packed_freqs, sections = ctx.saved_tensors
        weights = any(ctx.needs_input_grad[2:4])
        arguments: Any = (*tensors, q_grad, k_grad, positions, packed_freqs, sections)
        arguments += (*ctx.settings, weights)
        grads = launch_backward(*arguments)
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
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys, normed and rotated; if `save`, the reciprocal norms of both.

    Without `save`, the last two outputs are empty, and there is no derivative.
    """
    q_out, k_out, *rstd = launch_forward(
        q, k, q_weight, k_weight, positions, packed_freqs, sections, eps, offset, interleaved,
        heads_dim, save,
    )  # fmt: skip
    return q_out, k_out, *(rstd if save else _no_rstd(q))


def _no_rstd(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


@qk_norm_rope_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (*_, heads_dim, save), norm_all_heads = rest, q_weight.ndim == 2
    rstd = [_empty_rstd(x, heads_dim, norm_all_heads) for x in (q, k)] if save else _no_rstd(q)
    return torch.empty_like(q), torch.empty_like(k), *rstd


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
    weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `qk_norm_rope`; empty ones for weights unless `weights`."""
    dq, dk, dq_weight, dk_weight = launch_backward(
        q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, positions, packed_freqs, sections,
        offset, interleaved, heads_dim, False, weights,
    )  # fmt: skip
    if dq_weight is None or dk_weight is None:
        return dq, dk, q_weight.new_empty(0), k_weight.new_empty(0)
    return dq, dk, dq_weight, dk_weight


@qk_norm_rope_backward_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (
        torch.empty_like(weight) if rest[-1] else weight.new_empty(0)
        for weight in (q_weight, k_weight)
    )
    return torch.empty_like(q), torch.empty_like(k), next(weights), next(weights)


def _norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, positions, packed_freqs, sections, _, *settings, save = inputs
    ctx.has_derivative = save
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:], positions, packed_freqs, sections)
    ctx.settings = settings


def _norm_backward(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor, *_: Any) -> Any:
    if not ctx.has_derivative:
        raise RuntimeError(
            "qk_norm_rope was called with save=False, without what its derivative needs: "
            "call rope_patch.ops.qk_norm_rope, which saves where gradients are required"
        )
    *tensors, positions, packed_freqs, sections = ctx.saved_tensors
    q, k = tensors[:2]
    weights = any(ctx.needs_input_grad[2:4])
    q_grad = torch.zeros_like(q) if q_grad is None else q_grad
    k_grad = torch.zeros_like(k) if k_grad is None else k_grad
    dq, dk, *weight_grads = qk_norm_rope_backward_op(
        *tensors, q_grad, k_grad, positions, packed_freqs, sections, *ctx.settings, weights
    )
    return dq, dk, *(weight_grads if weights else (None, None)), *[None] * 8


qk_norm_rope_op.register_autograd(_norm_backward, setup_context=_norm_setup_context)
