"""Attention whose distances go through a position map, in one launch: the forward pass.

Queries and cached keys come rotated. A program takes a tile of queries, goes through the regions of
the map (see `AttentionRegions`), turns the queries once for each region and the keys tile by tile,
in registers, and keeps one softmax over all regions. Nothing that is turned is written to memory.

The heads that share keys are rows of one tile, token by token. So one kernel serves prompts and
decode steps. With few queries, several programs share their keys (split-k), and a second kernel
merges what they found.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rope_patch.ops.attention_reference import AttentionRegions
from rope_patch.ops.kernels.launcher import INTERPRETED, Launcher, LaunchSpec
from rope_patch.ops.kernels.tile import cos_sin, read_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_IS_INTERPRETED = tl.constexpr(INTERPRETED)

# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def tile_rows(tile, head, Q, GROUP: tl.constexpr, M: tl.constexpr):
    """Return the tokens and heads of a tile's rows, and which of them exist, `[M]` each."""
    row = tile * M + tl.arange(0, M)
    return row // GROUP, head * GROUP + row % GROUP, row // GROUP < Q


@triton.jit
def read_tokens(
    start, valid, stride, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
    UNROTATED: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load heads at `start`, `[ROWS, 1]`, in their dtype: both parts of the pairs, and the rest."""
    first, second = read_rows(start, valid, stride, R, PAIRS, INTERLEAVED)
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(first, (ROWS, PAIRS, 2)))
    if UNROTATED > 0:
        column = (R + tl.arange(0, UNROTATED))[None, :]
        third = tl.load(start + column * stride, mask=valid & (column < D), other=0.0)
    else:
        third = first  # is not used
    return first, second, third


@triton.jit
def shift_angles(
    shifts, tokens, valid, packed_freqs, R: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr
):
    """Return cos and sin of what turns some tokens, `[ROWS, PAIRS]`."""
    pair = tl.arange(0, PAIRS)
    freqs = tl.load(packed_freqs + pair, mask=pair < R // 2, other=0)
    if PARTS == 1:
        shift = tl.load(shifts + tokens, mask=valid, other=0)[:, None]
    else:
        at = shifts + tokens[:, None] * PARTS + (pair // (R // 2 // PARTS))[None, :]
        shift = tl.load(at, mask=valid[:, None] & (pair < R // 2)[None, :], other=0)
    return cos_sin(shift * freqs[None, :])


@triton.jit
def turn(first, second, cos, sin):
    """Turn the pairs of a tile, in its dtype."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def dot(a, b, total):
    """Return the product of two tiles, added to `total` in float32."""
    if _IS_INTERPRETED:  # the interpreter takes bfloat16's bits for whole numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def product(a1, a2, a3, b1, b2, b3, UNROTATED: tl.constexpr):
    """Return the dot products of all rows of two tiles, in float32."""
    total = tl.zeros((a1.shape[0], b1.shape[0]), dtype=tl.float32)
    total = dot(a1, tl.trans(b1), total)
    total = dot(a2, tl.trans(b2), total)
    if UNROTATED > 0:
        total = dot(a3, tl.trans(b3), total)
    return total


@triton.jit
def cap_logits(products, scaling, softcap, SOFTCAP: tl.constexpr):
    """Return logits in units of log 2, and tanh of what the soft cap was applied to."""
    if SOFTCAP:
        # tanh by one exponential, which may overflow to infinity.
        tanh = 2.0 / (1.0 + tl.exp2(products * (scaling / softcap * -2.0 * LOG2E))) - 1.0
        return tanh * (softcap * LOG2E), tanh
    else:
        return products * (scaling * LOG2E), products


@triton.jit
def _attend_keys(
    q1, q2, q3, k, v, k_s, k_d, v_s, v_d, key_shift, packed_freqs, first, last, lowest, highest,
    most, total, output, scaling, softcap, TURNS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, UNROTATED: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr,
    N: tl.constexpr, INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add the keys from `lowest` to `highest` to a tile's softmax, turned if TURNS."""
    dim = tl.arange(0, VALUES)[None, :]
    for slot in range(lowest, highest, N):
        slots = slot + tl.arange(0, N)
        exists = slots < highest
        rows = slots[:, None].to(tl.int64)
        k1, k2, k3 = read_tokens(
            k + rows * k_s, exists[:, None], k_d, D, R, PAIRS, UNROTATED, N, INTERLEAVED
        )
        if TURNS:
            cos, sin = shift_angles(key_shift, slots, exists, packed_freqs, R, PAIRS, PARTS)
            k1, k2 = turn(k1, k2, cos, sin)
        logits = product(q1, q2, q3, k1, k2, k3, UNROTATED)
        logits, _ = cap_logits(logits, scaling, softcap, SOFTCAP)
        seen = (slots[None, :] >= first[:, None]) & (slots[None, :] < last[:, None])
        logits = tl.where(seen & exists[None, :], logits, float("-inf"))
        new_most = tl.maximum(most, tl.max(logits, axis=1))
        # A row that sees nothing yet has no largest logit to subtract.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(most - base)
        values = tl.load(v + rows * v_s + dim * v_d, mask=exists[:, None] & (dim < E), other=0.0)
        output = dot(weights.to(values.dtype), values, output * shrink[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        most = new_most
    return most, total, output


@triton.jit(
    do_not_specialize=[
        "Q", "S", "regions", "split_size", "spans_b", "query_shift_b", "key_shift_b",
    ],
    do_not_specialize_on_alignment=[
        "start", "stop", "query_shift", "key_shift", "turns_keys", "packed_freqs", "sinks", "lse",
    ],
)  # fmt: skip
def attention_kernel(
    q, k, v, out, lse, start, stop, query_shift, key_shift, turns_keys, packed_freqs, sinks,
    Q, S, K, regions, split_size, spans_b, query_shift_b, key_shift_b,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, out_split, out_b, out_h, out_s,
    scaling, softcap,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    E: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries (grid: tiles, rows x key heads, parts of the keys).

    `lse` is contiguous, `[splits, B, H, Q]`. A split takes `split_size` slots; sinks go to the
    first one.
    """
    b = (tl.program_id(1) // K).to(tl.int64)
    head = tl.program_id(1) % K
    split = tl.program_id(2)
    token, heads, valid = tile_rows(tl.program_id(0), head, Q, GROUP, M)
    q_start = (q + b * q_b + heads.to(tl.int64) * q_h + token.to(tl.int64) * q_s)[:, None]
    k += b * k_b + head.to(tl.int64) * k_h
    v += b * v_b + head.to(tl.int64) * v_h
    most = tl.full((M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        most = tl.where(split == 0, sink, most)
        total = tl.where(split == 0, 1.0, total)
    output = tl.zeros((M, VALUES), dtype=tl.float32)
    for region in range(regions):
        place = b * 0 + region  # in 64 bits
        spans = b * spans_b + place * Q + token
        first = tl.load(start + spans, mask=valid, other=0)
        last = tl.load(stop + spans, mask=valid, other=0)
        lowest = tl.min(tl.where(last > first, first, S), axis=0)
        highest = tl.max(tl.where(last > first, last, 0), axis=0)
        lowest = tl.maximum(lowest, split * split_size)
        highest = tl.minimum(highest, (split + 1) * split_size)
        if lowest < highest:
            # Read anew for each region, because registers are few.
            q1, q2, q3 = read_tokens(
                q_start, valid[:, None], q_d, D, R, PAIRS, UNROTATED, M, INTERLEAVED
            )
            shifts = query_shift + b * query_shift_b + place * Q * PARTS
            cos, sin = shift_angles(shifts, token, valid, packed_freqs, R, PAIRS, PARTS)
            q1, q2 = turn(q1, q2, cos, sin)
            shifts = key_shift + b * key_shift_b + place * S * PARTS
            if tl.load(turns_keys + region) != 0:
                most, total, output = _attend_keys(
                    q1, q2, q3, k, v, k_s, k_d, v_s, v_d, shifts, packed_freqs, first, last, lowest,
                    highest, most, total, output, scaling, softcap, True, D, R, PAIRS, UNROTATED,
                    E, VALUES, N, INTERLEAVED, PARTS, SOFTCAP,
                )  # fmt: skip
            else:
                most, total, output = _attend_keys(
                    q1, q2, q3, k, v, k_s, k_d, v_s, v_d, shifts, packed_freqs, first, last, lowest,
                    highest, most, total, output, scaling, softcap, False, D, R, PAIRS, UNROTATED,
                    E, VALUES, N, INTERLEAVED, PARTS, SOFTCAP,
                )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # rows without keys, whose logits sum to -inf
    output = output / total[:, None]
    dim = tl.arange(0, VALUES)[None, :]
    at = out + split.to(tl.int64) * out_split + b * out_b
    at = at + (heads.to(tl.int64) * out_h + token.to(tl.int64) * out_s)[:, None] + dim
    tl.store(at, output.to(out.dtype.element_ty), mask=valid[:, None] & (dim < E))
    rows = ((split * tl.num_programs(1) // K + b) * K * GROUP + heads).to(tl.int64) * Q + token
    tl.store(lse + rows, (most + tl.log2(total)) * LN2, mask=valid)


@triton.jit(do_not_specialize=["rows", "splits"], do_not_specialize_on_alignment=["lses", "lse"])
def merge_kernel(
    outputs, lses, out, lse, rows, splits, H, Q, out_b, out_h, out_s,
    E: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Merge one query's parts `[splits, B, H, Q, E]` of a head (grid: rows, B x H x Q)."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, VALUES)
    most = tl.full((), float("-inf"), dtype=tl.float32)
    for split in range(splits):
        most = tl.maximum(most, tl.load(lses + (row * 0 + split) * rows + row))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros((), dtype=tl.float32)
    output = tl.zeros((VALUES,), dtype=tl.float32)
    for split in range(splits):
        at = (row * 0 + split) * rows + row
        share = tl.exp2((tl.load(lses + at) - base) * LOG2E)
        total += share
        output += share * tl.load(outputs + at * E + dim, mask=dim < E, other=0.0)
    total = tl.where(total == 0.0, 1.0, total)
    output = output / total
    at = row // (H * Q) * out_b + row // Q % H * out_h + row % Q * out_s
    tl.store(out + at + dim, output.to(out.dtype.element_ty), mask=dim < E)
    tl.store(lse + row, most + tl.log2(total) * LN2)


# -- launch ----------------------------------------------------------------------------------------

_launcher = Launcher(attention_kernel)
_merge_launcher = Launcher(merge_kernel)

# Products of tiles have 16 rows, columns and terms at least.
_LEAST = 16

# Programs that fill a large GPU, and the least slots that one of several splits takes.
_PROGRAMS, _LEAST_SLOTS = 256, 256


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    regions: AttentionRegions,
    scaling: float,
    softcap: float | None,
    interleaved: bool,
    splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; its results equal `rope_patch.ops.attention_reference.attend`.

    Args:
        splits: How many programs share the keys of a query; see `count_splits`.

    Returns:
        `[B, H, Q, E]`, in memory tokens before heads, and the log-sum-exp `[B, H, Q]` in float32.
    """
    batch, heads, steps, _ = q.shape
    slots, dims = k.shape[2], v.shape[-1]
    out = q.new_empty(batch, steps, heads, dims).transpose(1, 2)
    lse = q.new_empty(batch, heads, steps, dtype=torch.float32)
    if not q.numel():
        return out, lse
    if splits == 1:
        outputs, lses = out[None], lse
    else:
        outputs = q.new_empty(splits, batch, heads, steps, dims, dtype=torch.float32)
        lses = q.new_empty(splits, batch, heads, steps, dtype=torch.float32)
    split_size = triton.cdiv(slots, splits)
    tables = vars(regions).values()
    # Without sinks, the kernel does not read this pointer.
    tensors = (q, k, v, outputs, lses, *tables, lse if sinks is None else sinks)
    key = (
        splits, *((x.shape, x.stride(), x.dtype) for x in tensors), q.device, scaling, softcap,
        interleaved, sinks is None,
    )  # fmt: skip
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
    settings = (regions, scaling, softcap, sinks, interleaved, split_size)
    _launcher(key, tensors, bits, _make_spec, q, k, v, outputs, settings)
    if splits > 1:
        merged: Any = (outputs, lses, out, lse)
        merge_key = (splits, out.shape, out.dtype, out.device)
        _merge_launcher(merge_key, merged, 0, _make_merge_spec, outputs, out)
    return out, lse


def count_splits(q: torch.Tensor, k: torch.Tensor) -> int:
    """Return by how many programs the keys of a query are best shared: 1 for prompts."""
    tiles = triton.cdiv(q.shape[1] // k.shape[1] * q.shape[2], _LEAST)
    programs = max(q.shape[0] * k.shape[1] * tiles, 1)
    return max(1, min(_PROGRAMS // programs, k.shape[2] // _LEAST_SLOTS))


def head_sizes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, regions: AttentionRegions
) -> dict[str, int]:
    """Return the size constants of heads; parts of a tile are padded to powers of two."""
    unrotated, dims = q.shape[-1] - regions.rotary_dim, v.shape[-1]
    return {
        "D": q.shape[-1],
        "R": regions.rotary_dim,
        "PAIRS": _pad(regions.rotary_dim // 2),
        "UNROTATED": _pad(unrotated) if unrotated else 0,
        "E": dims,
        "VALUES": _pad(dims),
        "GROUP": q.shape[1] // k.shape[1],
    }


def tile_size(q: torch.Tensor, k: torch.Tensor, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Return rows and keys of a tile, and the warps of a program."""
    rows = q.shape[2] * sizes["GROUP"]
    if INTERPRETED:  # several tiles even of short texts
        return _LEAST, _LEAST, 1
    # The most that fit into registers on sm_80 and sm_90; tests/machine_code counts them. Products
    # in float32 take no tensor cores.
    if q.dtype == torch.float32:
        tile, keys, warps = 64, 32, 4
    elif sizes["D"] > 128:
        tile, keys, warps = 64, 16, 8
    else:
        tile, keys, warps = 128, 32, 8
    return (tile, keys, warps) if _pad(rows) >= tile else (_pad(rows), keys, 4)


def _pad(size: int) -> int:
    return max(_LEAST, triton.next_power_of_2(size))


def table_scalars(q: torch.Tensor, k: torch.Tensor, regions: AttentionRegions) -> tuple[int, ...]:
    """Return the scalars from Q to `key_shift_b` but the size of a split."""
    tables = (regions.start, regions.query_shift, regions.key_shift)
    steps = (0 if x.shape[0] == 1 else x.stride(0) for x in tables)
    return (q.shape[2], k.shape[2], k.shape[1], regions.start.shape[1], *steps)


def _make_spec(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outputs: torch.Tensor, settings: Any
) -> LaunchSpec:
    regions, scaling, softcap, sinks, interleaved, split_size = settings
    sizes = head_sizes(q, k, v, regions)
    tile, keys, warps = tile_size(q, k, sizes)
    *first, spans, query_shifts, key_shifts = table_scalars(q, k, regions)
    tables = (*first, split_size, spans, query_shifts, key_shifts)
    scalars = (*tables, *q.stride(), *k.stride(), *v.stride(), *outputs.stride()[:4])
    programs = triton.cdiv(q.shape[2] * sizes["GROUP"], tile)
    return LaunchSpec(
        (programs, q.shape[0] * k.shape[1], outputs.shape[0]),
        (*scalars, scaling, 1.0 if softcap is None else softcap),
        {
            **sizes,
            "M": tile,
            "N": keys,
            "INTERLEAVED": interleaved,
            "PARTS": regions.parts,
            "SOFTCAP": softcap is not None,
            "SINKS": sinks is not None,
        },
        warps,
    )


def _make_merge_spec(outputs: torch.Tensor, out: torch.Tensor) -> LaunchSpec:
    splits, batch, heads, steps, dims = outputs.shape
    rows = batch * heads * steps
    strides = (out.stride(0), out.stride(1), out.stride(2))
    return LaunchSpec(
        (rows, 1, 1),
        (rows, splits, heads, steps, *strides),
        {"E": dims, "VALUES": _pad(dims)},
    )
