"""Attention whose distances go through a position map: gradients of queries, keys and values.

The weights are computed again from the log-sum-exp of the forward pass. One kernel goes through the
keys of a tile of queries, another one through the queries of a tile of keys. In each region the
gradients are those of turned queries and keys, so they are turned back before they are added up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rope_patch.ops.attention_reference import AttentionRegions
from rope_patch.ops.kernels.attention import (
    LOG2E,
    cap_logits,
    dot,
    head_sizes,
    launch,
    product,
    read_tokens,
    shift_angles,
    table_scalars,
    tile_rows,
    tile_size,
    turn,
)
from rope_patch.ops.kernels.launcher import INTERPRETED, Launcher, LaunchSpec
from rope_patch.ops.modes import require_first_order

# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def _weigh(
    q1, q2, q3, k1, k2, k3, values, out_grad, lse, delta, seen, scaling, softcap,
    UNROTATED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile `[M, N]`, and the gradients of its products."""
    products = product(q1, q2, q3, k1, k2, k3, UNROTATED)
    logits, tanh = cap_logits(products, scaling, softcap, SOFTCAP)
    weights = tl.where(seen, tl.exp2(logits - lse[:, None] * LOG2E), 0.0)
    grads = dot(out_grad, tl.trans(values), tl.zeros_like(weights))
    grads = weights * (grads - delta[:, None]) * scaling
    if SOFTCAP:
        grads = grads * (1.0 - tanh * tanh)
    return weights, grads


@triton.jit
def _store_heads(
    at, valid, stride, first, second, third, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
    UNROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store what `read_tokens` loads, at `at`, `[ROWS, 1]`."""
    pair = tl.arange(0, PAIRS)[None, :]
    dtype = at.dtype.element_ty
    step: tl.constexpr = 2 if INTERLEAVED else 1
    gap: tl.constexpr = 1 if INTERLEAVED else R // 2
    rotates = valid & (pair < R // 2)
    tl.store(at + pair * step * stride, first.to(dtype), mask=rotates)
    tl.store(at + (pair * step + gap) * stride, second.to(dtype), mask=rotates)
    if UNROTATED > 0:
        column = (R + tl.arange(0, UNROTATED))[None, :]
        tl.store(at + column * stride, third.to(dtype), mask=valid & (column < D))


@triton.jit
def _read_values(start, valid, stride, E: tl.constexpr, VALUES: tl.constexpr):
    """Load values, or their gradients, at `start`, `[ROWS, 1]`."""
    dim = tl.arange(0, VALUES)[None, :]
    return tl.load(start + dim * stride, mask=valid & (dim < E), other=0.0)


_NOT_SPECIAL = ["Q", "S", "regions", "spans_b", "query_shift_b", "key_shift_b"]
_TABLES = [
    "start",
    "stop",
    "query_shift",
    "key_shift",
    "turns_keys",
    "packed_freqs",
    "lse",
    "delta",
]


@triton.jit(do_not_specialize=_NOT_SPECIAL, do_not_specialize_on_alignment=_TABLES)
def query_grad_kernel(
    q, k, v, out_grad, q_grad, lse, delta, start, stop, query_shift, key_shift, turns_keys,
    packed_freqs,
    Q, S, K, regions, spans_b, query_shift_b, key_shift_b,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_s, g_d,
    qg_b, qg_h, qg_s, qg_d, scaling, softcap,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    E: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Compute gradients of one tile of queries (grid: tiles, rows x key heads)."""
    b = (tl.program_id(1) // K).to(tl.int64)
    head = tl.program_id(1) % K
    token, heads, valid = tile_rows(tl.program_id(0), head, Q, GROUP, M)
    head64, token64 = heads.to(tl.int64), token.to(tl.int64)
    q_start = (q + b * q_b + head64 * q_h + token64 * q_s)[:, None]
    k += b * k_b + head.to(tl.int64) * k_h
    v += b * v_b + head.to(tl.int64) * v_h
    g_start = (out_grad + b * g_b + head64 * g_h + token64 * g_s)[:, None]
    grad = _read_values(g_start, valid[:, None], g_d, E, VALUES)
    rows = (b * K * GROUP + head64) * Q + token64
    row_lse = tl.load(lse + rows, mask=valid, other=0.0)
    row_delta = tl.load(delta + rows, mask=valid, other=0.0)
    total1 = tl.zeros((M, PAIRS), dtype=tl.float32)
    total2 = tl.zeros((M, PAIRS), dtype=tl.float32)
    total3 = tl.zeros((M, UNROTATED if UNROTATED > 0 else PAIRS), dtype=tl.float32)
    for region in range(regions):
        place = b * 0 + region  # in 64 bits
        spans = b * spans_b + place * Q + token
        first = tl.load(start + spans, mask=valid, other=0)
        last = tl.load(stop + spans, mask=valid, other=0)
        lowest = tl.min(tl.where(last > first, first, S), axis=0)
        highest = tl.max(tl.where(last > first, last, 0), axis=0)
        if lowest < highest:
            q1, q2, q3 = read_tokens(
                q_start, valid[:, None], q_d, D, R, PAIRS, UNROTATED, M, INTERLEAVED
            )
            shifts = query_shift + b * query_shift_b + place * Q * PARTS
            cos, sin = shift_angles(shifts, token, valid, packed_freqs, R, PAIRS, PARTS)
            q1, q2 = turn(q1, q2, cos, sin)
            shifts = key_shift + b * key_shift_b + place * S * PARTS
            turns = tl.load(turns_keys + region) != 0
            grad1 = tl.zeros((M, PAIRS), dtype=tl.float32)
            grad2 = tl.zeros((M, PAIRS), dtype=tl.float32)
            for slot in range(lowest, highest, N):
                slots = slot + tl.arange(0, N)
                exists = slots < highest
                at = slots[:, None].to(tl.int64)
                k1, k2, k3 = read_tokens(
                    k + at * k_s, exists[:, None], k_d, D, R, PAIRS, UNROTATED, N, INTERLEAVED
                )
                if turns:
                    key_cos, key_sin = shift_angles(
                        shifts, slots, exists, packed_freqs, R, PAIRS, PARTS
                    )
                    k1, k2 = turn(k1, k2, key_cos, key_sin)
                values = _read_values(v + at * v_s, exists[:, None], v_d, E, VALUES)
                seen = (slots[None, :] >= first[:, None]) & (slots[None, :] < last[:, None])
                _, grads = _weigh(
                    q1, q2, q3, k1, k2, k3, values, grad, row_lse, row_delta, seen, scaling,
                    softcap, UNROTATED, SOFTCAP,
                )  # fmt: skip
                grads = grads.to(k1.dtype)
                grad1 = dot(grads, k1, grad1)
                grad2 = dot(grads, k2, grad2)
                if UNROTATED > 0:
                    total3 = dot(grads, k3, total3)
            total1 += grad1 * cos + grad2 * sin
            total2 += grad2 * cos - grad1 * sin
    at = (q_grad + b * qg_b + head64 * qg_h + token64 * qg_s)[:, None]
    _store_heads(
        at, valid[:, None], qg_d, total1, total2, total3, D, R, PAIRS, UNROTATED, INTERLEAVED
    )


@triton.jit(do_not_specialize=_NOT_SPECIAL, do_not_specialize_on_alignment=_TABLES)
def key_grad_kernel(
    q, k, v, out_grad, k_grad, v_grad, lse, delta, start, stop, query_shift, key_shift, turns_keys,
    packed_freqs,
    Q, S, K, regions, spans_b, query_shift_b, key_shift_b,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, g_b, g_h, g_s, g_d,
    kg_b, kg_h, kg_s, kg_d, vg_b, vg_h, vg_s, vg_d, scaling, softcap,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    E: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Compute gradients of one tile of keys and their values (grid: tiles, rows x key heads).

    The sum over the heads that share the keys is a sum over rows of tiles.
    """
    b = (tl.program_id(1) // K).to(tl.int64)
    head = tl.program_id(1) % K
    slots = tl.program_id(0) * N + tl.arange(0, N)
    exists = slots < S
    at = slots[:, None].to(tl.int64)
    k_start = k + b * k_b + head.to(tl.int64) * k_h + at * k_s
    v_start = v + b * v_b + head.to(tl.int64) * v_h + at * v_s
    values = _read_values(v_start, exists[:, None], v_d, E, VALUES)
    value_grad = tl.zeros((N, VALUES), dtype=tl.float32)
    total1 = tl.zeros((N, PAIRS), dtype=tl.float32)
    total2 = tl.zeros((N, PAIRS), dtype=tl.float32)
    total3 = tl.zeros((N, UNROTATED if UNROTATED > 0 else PAIRS), dtype=tl.float32)
    for region in range(regions):
        place = b * 0 + region  # in 64 bits
        k1, k2, k3 = read_tokens(
            k_start, exists[:, None], k_d, D, R, PAIRS, UNROTATED, N, INTERLEAVED
        )
        shifts = key_shift + b * key_shift_b + place * S * PARTS
        key_cos, key_sin = shift_angles(shifts, slots, exists, packed_freqs, R, PAIRS, PARTS)
        k1, k2 = turn(k1, k2, key_cos, key_sin)
        grad1 = tl.zeros((N, PAIRS), dtype=tl.float32)
        grad2 = tl.zeros((N, PAIRS), dtype=tl.float32)
        for tile in range(0, tl.cdiv(Q * GROUP, M)):
            token, heads, valid = tile_rows(tile, head, Q, GROUP, M)
            spans = b * spans_b + place * Q + token
            first = tl.load(start + spans, mask=valid, other=0)
            last = tl.load(stop + spans, mask=valid, other=0)
            seen = (slots[None, :] >= first[:, None]) & (slots[None, :] < last[:, None])
            if tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0) != 0:
                head64, token64 = heads.to(tl.int64), token.to(tl.int64)
                q_start = (q + b * q_b + head64 * q_h + token64 * q_s)[:, None]
                q1, q2, q3 = read_tokens(
                    q_start, valid[:, None], q_d, D, R, PAIRS, UNROTATED, M, INTERLEAVED
                )
                turns = query_shift + b * query_shift_b + place * Q * PARTS
                cos, sin = shift_angles(turns, token, valid, packed_freqs, R, PAIRS, PARTS)
                q1, q2 = turn(q1, q2, cos, sin)
                g_start = (out_grad + b * g_b + head64 * g_h + token64 * g_s)[:, None]
                grad = _read_values(g_start, valid[:, None], g_d, E, VALUES)
                rows = (b * K * GROUP + head64) * Q + token64
                row_lse = tl.load(lse + rows, mask=valid, other=0.0)
                row_delta = tl.load(delta + rows, mask=valid, other=0.0)
                weights, grads = _weigh(
                    q1, q2, q3, k1, k2, k3, values, grad, row_lse, row_delta, seen, scaling,
                    softcap, UNROTATED, SOFTCAP,
                )  # fmt: skip
                value_grad = dot(tl.trans(weights.to(grad.dtype)), grad, value_grad)
                grads = tl.trans(grads.to(q1.dtype))
                grad1 = dot(grads, q1, grad1)
                grad2 = dot(grads, q2, grad2)
                if UNROTATED > 0:
                    total3 = dot(grads, q3, total3)
        total1 += grad1 * key_cos + grad2 * key_sin
        total2 += grad2 * key_cos - grad1 * key_sin
    target = k_grad + b * kg_b + head.to(tl.int64) * kg_h + at * kg_s
    _store_heads(
        target, exists[:, None], kg_d, total1, total2, total3, D, R, PAIRS, UNROTATED, INTERLEAVED
    )
    dim = tl.arange(0, VALUES)[None, :]
    target = v_grad + b * vg_b + head.to(tl.int64) * vg_h + at * vg_s + dim * vg_d
    tl.store(target, value_grad.to(v_grad.dtype.element_ty), mask=exists[:, None] & (dim < E))


# -- launches --------------------------------------------------------------------------------------

_query_launcher = Launcher(query_grad_kernel)
_key_launcher = Launcher(key_grad_kernel)


def launch_backward(
    out_grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    regions: AttentionRegions,
    scaling: float,
    softcap: float | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch both kernels.

    Returns:
        Gradients like q, k and v, and the sum of output times gradient for each query,
        `[B, H, Q]`, which the gradient of sinks depends on.
    """
    delta = (out.float() * out_grad.float()).sum(-1).contiguous()
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if not q.numel():
        return grads[0], grads[1].zero_(), grads[2].zero_(), delta
    rest = (lse, delta, *vars(regions).values())
    settings = (regions, scaling, softcap, interleaved)
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr() | out_grad.data_ptr()
    for launcher, results in ((_query_launcher, grads[:1]), (_key_launcher, grads[1:])):
        tensors = (q, k, v, out_grad, *results, *rest)
        key = (
            *((x.shape, x.stride(), x.dtype) for x in tensors), q.device, scaling, softcap,
            interleaved,
        )  # fmt: skip
        launcher(key, tensors, bits, _make_spec, tensors[:-8], settings)
    return grads[0], grads[1], grads[2], delta


def _make_spec(tensors: tuple[torch.Tensor, ...], settings: Any) -> LaunchSpec:
    regions, scaling, softcap, interleaved = settings
    q, k, v, *_ = tensors
    sizes = head_sizes(q, k, v, regions)
    tile, keys, warps = tile_size(q, k, sizes)
    rows = q.shape[2] * sizes["GROUP"]
    is_keys = len(tensors) == 6
    if not INTERPRETED:  # there are more sums in registers than in the forward pass
        tile, keys, warps = min(tile, 16 if is_keys else 32), min(keys, 32), 8
    programs = triton.cdiv(k.shape[2], keys) if is_keys else triton.cdiv(rows, tile)
    strides = [step for x in tensors for step in x.stride()]
    return LaunchSpec(
        (programs, q.shape[0] * k.shape[1], 1),
        (*table_scalars(q, k, regions), *strides, scaling, 1.0 if softcap is None else softcap),
        {
            **sizes,
            "M": tile,
            "N": keys,
            "INTERLEAVED": interleaved,
            "PARTS": regions.parts,
            "SOFTCAP": softcap is not None,
        },
        warps,
    )


class AttentionFunction(torch.autograd.Function):
    """Attention with first derivatives by queries, keys, values and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        regions: AttentionRegions,
        scaling: float,
        softcap: float | None,
        interleaved: bool,
        splits: int,
    ) -> torch.Tensor:
        out, lse = launch(q, k, v, sinks, regions, scaling, softcap, interleaved, splits)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = (regions, scaling, softcap, interleaved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        require_first_order("mapped attention in Triton", 'patch with kernels="reference"')
        q, k, v, sinks, out, lse = ctx.saved_tensors
        q_grad, k_grad, v_grad, delta = launch_backward(grads[0], q, k, v, out, lse, *ctx.settings)
        sink_grad = None
        if sinks is not None and ctx.needs_input_grad[3]:
            weights = torch.exp(sinks.float().view(1, -1, 1) - lse)
            sink_grad = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        return q_grad, k_grad, v_grad, sink_grad, None, None, None, None, None
