"""Queries and keys normed and rotated, in one launch each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rope_patch.ops.kernels.launcher import (
    Launcher,
    Plan,
    position_strides,
    row_stride,
    shares,
    strides,
    tile,
)
from rope_patch.ops.kernels.tile import (
    angles,
    dot,
    factor_of,
    load_pairs,
    load_tail,
    load_weights,
    store_pairs,
    store_tail,
    turn,
)
from rope_patch.ops.validation import validate_shapes

# Programs of the backward pass: enough to fill a large GPU, few enough that the weights' gradients,
# of which each program writes its own part, are little beside the keys. The same everywhere, so
# that sums are taken in the same order on every device.
_PROGRAMS = 2048

# The same where a program holds all heads of a token at once, with as many weights, in 8 warps.
_PROGRAMS_ACROSS = 512
_WARPS_ACROSS = 8


@triton.jit
def _norm_and_rotate(
    x, weight, out, rstd, heads, x_h, x_d, out_h, out_d, cos, sin, eps, OFFSET: tl.constexpr,
    ACROSS: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All heads of a token that are this program's; the pointers stand at the token."""
    shared: tl.constexpr = HEADS if ACROSS else 1
    weight_h: tl.constexpr = D if ACROSS else 0
    w1, w2, w3 = load_weights(
        weight, heads, weight_h, 0, OFFSET, D, R, PAIRS, TAIL, shared, INTERLEAVED
    )
    size = D * heads if ACROSS else D
    for row in range(tl.program_id(1) * HEADS, heads, tl.num_programs(1) * HEADS):
        x1, x2 = load_pairs(x, heads, x_h, x_d, row, R, PAIRS, HEADS, INTERLEAVED)
        x3 = load_tail(x, heads, x_h, x_d, row, D, R, TAIL, HEADS)
        squares = dot(x1, x2, x3, x1, x2, x3, ACROSS, TAIL)
        r = tl.rsqrt(squares / size + eps)
        if SAVE:
            at = row + tl.arange(0, HEADS)
            tl.store(rstd + at, r, mask=at < (1 if ACROSS else heads))
        r = r[:, None]
        y1, y2 = turn(x1 * r * w1, x2 * r * w2, cos, sin)
        store_pairs(out, y1, y2, heads, out_h, out_d, row, R, PAIRS, HEADS, INTERLEAVED)
        store_tail(out, x3 * r * w3, heads, out_h, out_d, row, D, R, TAIL, HEADS)


@triton.jit(
    do_not_specialize=["S", "H", "K", "positions_a", "positions_b", "positions_s", "turns_b"],
    do_not_specialize_on_alignment=["positions", "turns", "sections"],
)
def forward_kernel(
    q, k, q_weight, k_weight, q_out, k_out, q_rstd, k_rstd, positions, turns, sections,
    eps, S, H, K,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    positions_a, positions_b, positions_s, turns_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    OFFSET: tl.constexpr, ACROSS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """One program a token, or several with a share of its heads each (grid: tokens, shares)."""
    token = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(0) // S).to(tl.int64)
    s = (tl.program_id(0) % S).to(tl.int64)
    turns += b * turns_b
    positions += b * positions_b + s * positions_s
    cos, sin = angles(positions, turns, sections, positions_a, SECTIONS, R, PAIRS)
    factor = factor_of(turns, R)
    cos *= factor
    sin *= factor
    _norm_and_rotate(
        q + b * q_b + s * q_s, q_weight, q_out + b * qo_b + s * qo_s,
        q_rstd + token * (1 if ACROSS else H), H, q_h, q_d, qo_h, qo_d, cos, sin, eps,
        OFFSET, ACROSS, SAVE, D, R, PAIRS, TAIL, HEADS, INTERLEAVED,
    )  # fmt: skip
    _norm_and_rotate(
        k + b * k_b + s * k_s, k_weight, k_out + b * ko_b + s * ko_s,
        k_rstd + token * (1 if ACROSS else K), K, k_h, k_d, ko_h, ko_d, cos, sin, eps,
        OFFSET, ACROSS, SAVE, D, R, PAIRS, TAIL, HEADS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _gradients(
    saved, weight, rstd, grad, out, weight_grads, positions, turns, sections, tokens, S, heads,
    saved_b, saved_s, saved_h, saved_d, grad_b, grad_s, grad_h, grad_d, out_b, out_s, out_h, out_d,
    positions_a, positions_b, positions_s, turns_b, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    SECTIONS: tl.constexpr, OFFSET: tl.constexpr, ACROSS: tl.constexpr, REDERIVE: tl.constexpr,
):  # fmt: skip
    """The gradients of queries or of keys, of every token that is this program's."""
    shared: tl.constexpr = HEADS if ACROSS else 1
    weight_h: tl.constexpr = D if ACROSS else 0
    w1, w2, w3 = load_weights(
        weight, heads, weight_h, 0, OFFSET, D, R, PAIRS, TAIL, shared, INTERLEAVED
    )
    size = D * heads if ACROSS else D
    sum1 = tl.zeros((HEADS, PAIRS), dtype=tl.float32)
    sum2 = tl.zeros((HEADS, PAIRS), dtype=tl.float32)
    sum3 = tl.zeros((HEADS, TAIL if TAIL > 0 else 1), dtype=tl.float32)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        wide = tl.full((), 0, tl.int64)
        token, b, s = index + wide, index // S + wide, index % S + wide
        own_turns = turns + b * turns_b
        at = positions + b * positions_b + s * positions_s
        cos, sin = angles(at, own_turns, sections, positions_a, SECTIONS, R, PAIRS)
        factor = factor_of(own_turns, R)
        x = saved + b * saved_b + s * saved_s
        g = grad + b * grad_b + s * grad_s
        to = out + b * out_b + s * out_s
        reciprocals = rstd + token * (1 if ACROSS else heads)
        for row in range(0, heads, HEADS):
            g1, g2 = load_pairs(g, heads, grad_h, grad_d, row, R, PAIRS, HEADS, INTERLEAVED)
            g3 = load_tail(g, heads, grad_h, grad_d, row, D, R, TAIL, HEADS)
            g1, g2 = turn(g1, g2, cos * factor, -sin * factor)
            n1, n2 = load_pairs(x, heads, saved_h, saved_d, row, R, PAIRS, HEADS, INTERLEAVED)
            n3 = load_tail(x, heads, saved_h, saved_d, row, D, R, TAIL, HEADS)
            if ACROSS:
                r = tl.load(reciprocals) + tl.zeros((HEADS,), dtype=tl.float32)
            else:
                rows = row + tl.arange(0, HEADS)
                r = tl.load(reciprocals + rows, mask=rows < heads, other=0.0)
            r = r[:, None]
            if REDERIVE:  # x is the output: turned back and without weights it is the normed x
                n1, n2 = turn(n1, n2, cos / factor, -sin / factor)
                n1 = n1 / tl.where(w1 == 0, 1.0, w1)  # what is masked has no weight
                n2 = n2 / tl.where(w2 == 0, 1.0, w2)
                n3 = n3 / tl.where(w3 == 0, 1.0, w3)
            else:
                n1, n2, n3 = n1 * r, n2 * r, n3 * r
            mean = dot(g1 * w1, g2 * w2, g3 * w3, n1, n2, n3, ACROSS, TAIL)[:, None] / size
            d1 = (g1 * w1 - n1 * mean) * r
            d2 = (g2 * w2 - n2 * mean) * r
            d3 = (g3 * w3 - n3 * mean) * r
            store_pairs(to, d1, d2, heads, out_h, out_d, row, R, PAIRS, HEADS, INTERLEAVED)
            store_tail(to, d3, heads, out_h, out_d, row, D, R, TAIL, HEADS)
            sum1 += g1 * n1
            sum2 += g2 * n2
            sum3 += g3 * n3
    if not ACROSS:  # all heads share the weights
        sum1 = tl.sum(sum1, axis=0)[None, :]
        sum2 = tl.sum(sum2, axis=0)[None, :]
        sum3 = tl.sum(sum3, axis=0)[None, :]
    owners = heads if ACROSS else 1
    store_pairs(weight_grads, sum1, sum2, owners, D, 1, 0, R, PAIRS, shared, INTERLEAVED)
    store_tail(weight_grads, sum3, owners, D, 1, 0, D, R, TAIL, shared)


@triton.jit(
    do_not_specialize=[
        "S", "H", "K", "tokens", "positions_a", "positions_b", "positions_s", "turns_b",
    ],
    do_not_specialize_on_alignment=["positions", "turns", "sections"],
)  # fmt: skip
def backward_kernel(
    q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, q_out, k_out, weight_grads,
    positions, turns, sections,
    tokens, S, H, K,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qg_b, qg_s, qg_h, qg_d, kg_b, kg_s, kg_h, kg_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    positions_a, positions_b, positions_s, turns_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    OFFSET: tl.constexpr, ACROSS: tl.constexpr, REDERIVE: tl.constexpr,
):  # fmt: skip
    """Half of the programs take the queries, half the keys (grid: programs, 2).

    `weight_grads` is `[programs, weights of q and then of k]`, to be summed over its rows.
    """
    q_size = D * H if ACROSS else D
    k_size = D * K if ACROSS else D
    mine = weight_grads + tl.program_id(0).to(tl.int64) * (q_size + k_size)
    if tl.program_id(1) == 0:
        _gradients(
            q, q_weight, q_rstd, q_grad, q_out, mine, positions, turns, sections, tokens, S, H,
            q_b, q_s, q_h, q_d, qg_b, qg_s, qg_h, qg_d, qo_b, qo_s, qo_h, qo_d,
            positions_a, positions_b, positions_s, turns_b, D, R, PAIRS, TAIL, HEADS, INTERLEAVED,
            SECTIONS, OFFSET, ACROSS, REDERIVE,
        )  # fmt: skip
    else:
        _gradients(
            k, k_weight, k_rstd, k_grad, k_out, mine + q_size, positions, turns, sections, tokens,
            S, K, k_b, k_s, k_h, k_d, kg_b, kg_s, kg_h, kg_d, ko_b, ko_s, ko_h, ko_d,
            positions_a, positions_b, positions_s, turns_b, D, R, PAIRS, TAIL, HEADS, INTERLEAVED,
            SECTIONS, OFFSET, ACROSS, REDERIVE,
        )  # fmt: skip


_forward = Launcher(forward_kernel)
_backward = Launcher(backward_kernel)


def forward(
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
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the kernel; see `rope_patch.ops.reference.qk_norm_rope`, which it equals.

    Returns:
        Queries and keys, and where `save`, the reciprocal norms of both in float32, `[B, S, H]`, or
        `[B, S]` where heads are normed together.
    """
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if save:
        q_rstd, k_rstd = (empty_rstd(x, heads_dim, q_weight.ndim == 2) for x in (q, k))
    else:
        q_rstd, k_rstd = q_weight, k_weight  # pointers that nothing is written to
    axes = turns if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, q_weight.dtype, k_weight.dtype,
        q_weight.shape, q_weight.stride(), k_weight.shape, k_weight.stride(),
        positions.shape, positions.stride(), positions.dtype,
        turns.shape, turns.stride(), turns.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device.index, eps, offset, interleaved, heads_dim, save,
    )  # fmt: skip

    if q.numel() or k.numel():
        bits = q.data_ptr() | k.data_ptr() | q_weight.data_ptr() | k_weight.data_ptr()
        tensors = (q, k, q_weight, k_weight, q_out, k_out, q_rstd, k_rstd, positions, turns, axes)
        how = (eps, offset, interleaved, heads_dim, save)
        _forward(key, tensors, bits, _forward_plan, tensors, sections, how)
    return q_out, k_out, q_rstd, k_rstd


def backward(
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
    rederive: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and both weights.

    Args:
        q: What went in, or what came out where `rederive`.
        k: The same.
    """
    across = q_weight.ndim == 2
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    tokens = q.shape[0] * q.shape[3 - heads_dim]
    parts = torch.empty(
        min(tokens, _PROGRAMS_ACROSS if across else _PROGRAMS),
        q_weight.numel() + k_weight.numel(),
        device=q.device,
        dtype=torch.float32,
    )
    axes = turns if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, q_weight.dtype, k_weight.dtype,
        q_grad.stride(), q_grad.dtype, k_grad.stride(), k_grad.dtype,
        q_weight.shape, q_weight.stride(), k_weight.shape, k_weight.stride(),
        positions.shape, positions.stride(), positions.dtype,
        turns.shape, turns.stride(), turns.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device.index, offset, interleaved, heads_dim, rederive,
    )  # fmt: skip

    if tokens:
        bits = (
            q.data_ptr() | k.data_ptr() | q_weight.data_ptr() | k_weight.data_ptr()
            | q_grad.data_ptr() | k_grad.data_ptr()
        )  # fmt: skip
        tensors = (
            q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, q_out, k_out, parts,
            positions, turns, axes,
        )  # fmt: skip
        how = (offset, interleaved, heads_dim, rederive)
        _backward(key, tensors, bits, _backward_plan, tensors, sections, how)
    q_sum, k_sum = parts.sum(0).split([q_weight.numel(), k_weight.numel()])
    return (
        q_out,
        k_out,
        q_sum.view_as(q_weight).to(q_weight.dtype),
        k_sum.view_as(k_weight).to(k_weight.dtype),
    )


def empty_rstd(x: torch.Tensor, heads_dim: int, across: bool) -> torch.Tensor:
    """Room for the reciprocal norms of x, `[B, S, H]`, or `[B, S]` where `across` heads."""
    shape = (x.shape[0], x.shape[3 - heads_dim], *(() if across else (x.shape[heads_dim],)))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _forward_plan(
    tensors: tuple[torch.Tensor, ...], sections: torch.Tensor | None, how: tuple[Any, ...]
) -> Plan:
    q, k, q_weight, k_weight, q_out, k_out, _, _, positions, turns, _ = tensors
    eps, offset, interleaved, heads_dim, save = how
    validate_shapes(q, k, positions, turns, sections, heads_dim, q_weight, k_weight)
    across, tokens = q_weight.ndim == 2, q.shape[0] * q.shape[3 - heads_dim]
    constants = _constants(q, k, turns, sections, offset, interleaved, heads_dim, across)
    many = max(q.shape[heads_dim], k.shape[heads_dim])
    return Plan(
        (tokens, 1 if across else shares(tokens, many, constants["HEADS"]), 1),
        (eps, *_numbers((q, k, q_out, k_out), positions, turns, heads_dim)),
        {**constants, "SAVE": save},
        _WARPS_ACROSS if across else 1,
    )


def _backward_plan(
    tensors: tuple[torch.Tensor, ...], sections: torch.Tensor | None, how: tuple[Any, ...]
) -> Plan:
    q, k, q_weight, _, _, _, q_grad, k_grad, q_out, k_out, parts, positions, turns, _ = tensors
    offset, interleaved, heads_dim, rederive = how
    across, tokens = q_weight.ndim == 2, q.shape[0] * q.shape[3 - heads_dim]
    constants = _constants(q, k, turns, sections, offset, interleaved, heads_dim, across)
    if not across:  # two tiles at once and the sums: half a tile each leaves registers
        constants["HEADS"] = max(constants["HEADS"] // 2, 1)
    numbers = _numbers((q, k, q_grad, k_grad, q_out, k_out), positions, turns, heads_dim)
    return Plan(
        (len(parts), 2, 1),
        (tokens, *numbers),
        {**constants, "REDERIVE": rederive},
        _WARPS_ACROSS if across else 1,
    )


def _constants(
    q: torch.Tensor,
    k: torch.Tensor,
    turns: torch.Tensor,
    sections: torch.Tensor | None,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    across: bool,
) -> dict[str, Any]:
    many = max(q.shape[heads_dim], k.shape[heads_dim])
    sizes: dict[str, Any] = dict(tile(q.shape[-1], 2 * (turns.shape[-1] - 1), many))
    if across:
        sizes["HEADS"] = triton.next_power_of_2(many)
    return {
        **sizes,
        "INTERLEAVED": interleaved,
        "SECTIONS": sections is not None,
        "OFFSET": offset,
        "ACROSS": across,
    }


def _numbers(
    tensors: tuple[torch.Tensor, ...],
    positions: torch.Tensor,
    turns: torch.Tensor,
    heads_dim: int,
) -> tuple[int, ...]:
    """Sizes and strides; `tensors` start with queries and keys."""
    q, k = tensors[:2]
    numbers = [q.shape[3 - heads_dim], q.shape[heads_dim], k.shape[heads_dim]]
    for x in tensors:
        numbers += strides(x, heads_dim)
    return (*numbers, *position_strides(positions), row_stride(turns))
