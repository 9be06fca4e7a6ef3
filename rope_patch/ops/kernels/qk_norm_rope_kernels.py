"""Norm and rotate in Triton, and compute the gradients of queries, keys and weights.

`qk_norm_rope.py` launches the first two kernels; `sum_programs` launches the sum of the weights'
gradients over the programs of the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rope_patch.ops.kernels.launcher import INTERPRETED, Launcher, LaunchSpec
from rope_patch.ops.kernels.tile import (
    angles,
    attention_factor,
    dot,
    load_pairs,
    load_unrotated,
    load_weights,
    read_pairs,
    rotate,
    row_and_token,
    store_pairs,
    store_unrotated,
    widen_pairs,
)


@triton.jit
def _norm_tile(
    raw1, raw2, x, w1, w2, w3, out, rstd, heads, written, x_h, x_d, out_h, out_d, row, cos, sin,
    eps, NORM_ALL_HEADS: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, UNROTATED: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store a tile whose pairs `read_pairs` has read."""
    x1, x2 = widen_pairs(raw1, raw2, PAIRS, HEADS, INTERLEAVED)
    x3 = load_unrotated(x, heads, x_h, x_d, row, D, R, UNROTATED, HEADS)
    squares = dot(x1, x2, x3, x1, x2, x3, NORM_ALL_HEADS, UNROTATED)
    r = tl.rsqrt(squares / (D * heads if NORM_ALL_HEADS else D) + eps)
    if SAVE:
        rows = row + tl.arange(0, HEADS)
        tl.store(rstd + rows, r, mask=rows < (1 if NORM_ALL_HEADS else heads))
    r = r[:, None]
    y1, y2 = rotate(x1 * r * w1, x2 * r * w2, cos, sin)
    # The first `written` of the heads are stored.
    store_pairs(out, y1, y2, written, out_h, out_d, row, R, PAIRS, HEADS, INTERLEAVED)
    store_unrotated(out, x3 * r * w3, written, out_h, out_d, row, D, R, UNROTATED, HEADS)


@triton.jit
def norm_and_rotate(
    raw1, raw2, x, weight, out, rstd, heads, written, x_h, x_d, out_h, out_d, first_row, cos, sin,
    eps, OFFSET: tl.constexpr, NORM_ALL_HEADS: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, IS_READ: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a tile of a token's heads, and unless ONE_TILE those after it.

    The pointers point at the token. If IS_READ, `read_pairs` read the pairs of the first tile.
    """
    shared: tl.constexpr = HEADS if NORM_ALL_HEADS else 1
    weight_h: tl.constexpr = D if NORM_ALL_HEADS else 0
    w1, w2, w3 = load_weights(
        weight, heads, weight_h, 0, OFFSET, D, R, PAIRS, UNROTATED, shared, INTERLEAVED
    )
    if IS_READ:
        _norm_tile(
            raw1, raw2, x, w1, w2, w3, out, rstd, heads, written, x_h, x_d, out_h, out_d,
            first_row, cos, sin, eps, NORM_ALL_HEADS, SAVE, D, R, PAIRS, UNROTATED, HEADS,
            INTERLEAVED,
        )  # fmt: skip
    if not ONE_TILE:
        for row in range(first_row + (HEADS if IS_READ else 0), heads, HEADS):
            raw1, raw2 = read_pairs(x, heads, x_h, x_d, row, R, PAIRS, HEADS, INTERLEAVED)
            _norm_tile(
                raw1, raw2, x, w1, w2, w3, out, rstd, heads, written, x_h, x_d, out_h, out_d, row,
                cos, sin, eps, NORM_ALL_HEADS, SAVE, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED,
            )  # fmt: skip


@triton.jit
def cos_sin_of_token(
    positions, packed_freqs, sections, axis_stride, SECTIONS: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Return `angles` times the attention factor."""
    cos, sin = angles(positions, packed_freqs, sections, axis_stride, SECTIONS, R, PAIRS)
    factor = attention_factor(packed_freqs, R)
    return cos * factor, sin * factor


@triton.jit(
    do_not_specialize=["S", "H", "K", "positions_a", "positions_b", "positions_s", "freqs_b"],
    do_not_specialize_on_alignment=["positions", "packed_freqs", "sections"],
)
def forward_kernel(
    q, k, q_weight, k_weight, q_out, k_out, q_rstd, k_rstd, positions, packed_freqs, sections,
    eps, S, H, K,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    positions_a, positions_b, positions_s, freqs_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    OFFSET: tl.constexpr, NORM_ALL_HEADS: tl.constexpr, ROWS: tl.constexpr, SAVE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one token, or one tile of its heads if ONE_TILE (grid: tokens, tiles).

    The last tiles are those of keys. A tile is read while the angles are computed.
    """
    token = tl.program_id(0).to(tl.int64)
    b, s = row_and_token(tl.program_id(0), S, ROWS)
    packed_freqs += b * freqs_b
    positions += b * positions_b + s * positions_s
    q += b * q_b + s * q_s
    k += b * k_b + s * k_s
    q_out += b * qo_b + s * qo_s
    k_out += b * ko_b + s * ko_s
    q_rstd += token * (1 if NORM_ALL_HEADS else H)
    k_rstd += token * (1 if NORM_ALL_HEADS else K)
    if ONE_TILE:
        q_tiles = tl.cdiv(H, HEADS)
        if tl.program_id(1) < q_tiles:
            row = tl.program_id(1) * HEADS
            raw1, raw2 = read_pairs(q, H, q_h, q_d, row, R, PAIRS, HEADS, INTERLEAVED)
            cos, sin = cos_sin_of_token(
                positions, packed_freqs, sections, positions_a, SECTIONS, R, PAIRS
            )
            norm_and_rotate(
                raw1, raw2, q, q_weight, q_out, q_rstd, H, H, q_h, q_d, qo_h, qo_d, row, cos, sin,
                eps, OFFSET, NORM_ALL_HEADS, SAVE, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, True,
                True,
            )  # fmt: skip
        else:
            row = (tl.program_id(1) - q_tiles) * HEADS
            raw1, raw2 = read_pairs(k, K, k_h, k_d, row, R, PAIRS, HEADS, INTERLEAVED)
            cos, sin = cos_sin_of_token(
                positions, packed_freqs, sections, positions_a, SECTIONS, R, PAIRS
            )
            norm_and_rotate(
                raw1, raw2, k, k_weight, k_out, k_rstd, K, K, k_h, k_d, ko_h, ko_d, row, cos, sin,
                eps, OFFSET, NORM_ALL_HEADS, SAVE, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, True,
                True,
            )  # fmt: skip
    else:
        raw1, raw2 = read_pairs(q, H, q_h, q_d, 0, R, PAIRS, HEADS, INTERLEAVED)
        cos, sin = cos_sin_of_token(
            positions, packed_freqs, sections, positions_a, SECTIONS, R, PAIRS
        )
        norm_and_rotate(
            raw1, raw2, q, q_weight, q_out, q_rstd, H, H, q_h, q_d, qo_h, qo_d, 0, cos, sin, eps,
            OFFSET, NORM_ALL_HEADS, SAVE, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED,
            True, NORM_ALL_HEADS,
        )  # fmt: skip
        if NORM_ALL_HEADS:
            raw1, raw2 = read_pairs(k, K, k_h, k_d, 0, R, PAIRS, HEADS, INTERLEAVED)
        norm_and_rotate(
            raw1, raw2, k, k_weight, k_out, k_rstd, K, K, k_h, k_d, ko_h, ko_d, 0, cos, sin, eps,
            OFFSET, NORM_ALL_HEADS, SAVE, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED,
            NORM_ALL_HEADS, NORM_ALL_HEADS,
        )  # fmt: skip


@triton.jit
def _gradients(
    saved, weight, rstd, grad, out, weight_grads, positions, packed_freqs, sections,
    tokens, S, heads,
    saved_b, saved_s, saved_h, saved_d, grad_b, grad_s, grad_h, grad_d, out_b, out_s, out_h, out_d,
    positions_a, positions_b, positions_s, freqs_b, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, UNROTATED: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    SECTIONS: tl.constexpr, OFFSET: tl.constexpr, NORM_ALL_HEADS: tl.constexpr, ROWS: tl.constexpr,
    RECOMPUTE_INPUT: tl.constexpr, WEIGHTS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of this program's share of queries or keys, for all its tokens."""
    shared: tl.constexpr = HEADS if NORM_ALL_HEADS else 1
    weight_h: tl.constexpr = D if NORM_ALL_HEADS else 0
    w1, w2, w3 = load_weights(
        weight, heads, weight_h, 0, OFFSET, D, R, PAIRS, UNROTATED, shared, INTERLEAVED
    )
    size = D * heads if NORM_ALL_HEADS else D
    first_row = tl.program_id(2) * HEADS if SHARED else 0
    step = tl.num_programs(2) * HEADS if SHARED else HEADS
    if RECOMPUTE_INPUT:  # divide once, not for each head; masked weights are 0
        inverse1 = 1.0 / tl.where(w1 == 0, 1.0, w1)
        inverse2 = 1.0 / tl.where(w2 == 0, 1.0, w2)
        inverse3 = 1.0 / tl.where(w3 == 0, 1.0, w3)
    sum1 = tl.zeros((HEADS, PAIRS), dtype=tl.float32)
    sum2 = tl.zeros((HEADS, PAIRS), dtype=tl.float32)
    sum3 = tl.zeros((HEADS, UNROTATED if UNROTATED > 0 else 1), dtype=tl.float32)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = index + tl.full((), 0, tl.int64)
        b, s = row_and_token(index, S, ROWS)
        row_freqs = packed_freqs + b * freqs_b
        row_positions = positions + b * positions_b + s * positions_s
        cos, sin = angles(row_positions, row_freqs, sections, positions_a, SECTIONS, R, PAIRS)
        factor = attention_factor(row_freqs, R)
        inverse_factor = 1.0 / factor
        x = saved + b * saved_b + s * saved_s
        g = grad + b * grad_b + s * grad_s
        x_grad = out + b * out_b + s * out_s
        reciprocals = rstd + token * (1 if NORM_ALL_HEADS else heads)
        for row in range(first_row, heads, step):
            g1, g2 = load_pairs(g, heads, grad_h, grad_d, row, R, PAIRS, HEADS, INTERLEAVED)
            g3 = load_unrotated(g, heads, grad_h, grad_d, row, D, R, UNROTATED, HEADS)
            g1, g2 = rotate(g1, g2, cos * factor, -sin * factor)
            n1, n2 = load_pairs(x, heads, saved_h, saved_d, row, R, PAIRS, HEADS, INTERLEAVED)
            n3 = load_unrotated(x, heads, saved_h, saved_d, row, D, R, UNROTATED, HEADS)
            if NORM_ALL_HEADS:
                r = tl.load(reciprocals) + tl.zeros((HEADS,), dtype=tl.float32)
            else:
                rows = row + tl.arange(0, HEADS)
                r = tl.load(reciprocals + rows, mask=rows < heads, other=0.0)
            r = r[:, None]
            if RECOMPUTE_INPUT:  # x is the output: rotate it back and divide by the weights
                n1, n2 = rotate(n1, n2, cos * inverse_factor, -sin * inverse_factor)
                n1, n2, n3 = n1 * inverse1, n2 * inverse2, n3 * inverse3
            else:
                n1, n2, n3 = n1 * r, n2 * r, n3 * r
            total = dot(g1 * w1, g2 * w2, g3 * w3, n1, n2, n3, NORM_ALL_HEADS, UNROTATED)
            mean = total[:, None] / size
            d1 = (g1 * w1 - n1 * mean) * r
            d2 = (g2 * w2 - n2 * mean) * r
            d3 = (g3 * w3 - n3 * mean) * r
            store_pairs(x_grad, d1, d2, heads, out_h, out_d, row, R, PAIRS, HEADS, INTERLEAVED)
            store_unrotated(x_grad, d3, heads, out_h, out_d, row, D, R, UNROTATED, HEADS)
            if WEIGHTS:
                sum1 += g1 * n1
                sum2 += g2 * n2
                sum3 += g3 * n3
    if WEIGHTS:
        if not NORM_ALL_HEADS:  # all heads share the weights
            sum1 = tl.sum(sum1, axis=0)[None, :]
            sum2 = tl.sum(sum2, axis=0)[None, :]
            sum3 = tl.sum(sum3, axis=0)[None, :]
        owners = heads if NORM_ALL_HEADS else 1
        store_pairs(weight_grads, sum1, sum2, owners, D, 1, 0, R, PAIRS, shared, INTERLEAVED)
        store_unrotated(weight_grads, sum3, owners, D, 1, 0, D, R, UNROTATED, shared)


@triton.jit(
    do_not_specialize=[
        "S", "H", "K", "tokens", "positions_a", "positions_b", "positions_s", "freqs_b",
    ],
    do_not_specialize_on_alignment=["positions", "packed_freqs", "sections"],
)  # fmt: skip
def backward_kernel(
    q, k, q_weight, k_weight, q_rstd, k_rstd, q_grad, k_grad, q_out, k_out, weight_grads,
    positions, packed_freqs, sections,
    tokens, S, H, K,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qg_b, qg_s, qg_h, qg_d, kg_b, kg_s, kg_h, kg_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    positions_a, positions_b, positions_s, freqs_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr,
    OFFSET: tl.constexpr, NORM_ALL_HEADS: tl.constexpr, ROWS: tl.constexpr,
    RECOMPUTE_INPUT: tl.constexpr, WEIGHTS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients: half of the programs take queries, half keys.

    The grid is (programs, 2, shares of a token's heads), with several shares if SHARED.
    `weight_grads` is `[programs * shares, weights of q and then of k]`, whose rows are to be
    summed; it is written if WEIGHTS.
    """
    q_size = D * H if NORM_ALL_HEADS else D
    k_size = D * K if NORM_ALL_HEADS else D
    weight_row = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    weight_sums = weight_grads + weight_row.to(tl.int64) * (q_size + k_size)
    if tl.program_id(1) == 0:
        _gradients(
            q, q_weight, q_rstd, q_grad, q_out, weight_sums, positions, packed_freqs, sections,
            tokens, S, H,
            q_b, q_s, q_h, q_d, qg_b, qg_s, qg_h, qg_d, qo_b, qo_s, qo_h, qo_d,
            positions_a, positions_b, positions_s, freqs_b,
            D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, SECTIONS, OFFSET, NORM_ALL_HEADS, ROWS,
            RECOMPUTE_INPUT, WEIGHTS, SHARED,
        )  # fmt: skip
    else:
        _gradients(
            k, k_weight, k_rstd, k_grad, k_out, weight_sums + q_size, positions, packed_freqs,
            sections,
            tokens, S, K,
            k_b, k_s, k_h, k_d, kg_b, kg_s, kg_h, kg_d, ko_b, ko_s, ko_h, ko_d,
            positions_a, positions_b, positions_s, freqs_b,
            D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, SECTIONS, OFFSET, NORM_ALL_HEADS, ROWS,
            RECOMPUTE_INPUT, WEIGHTS, SHARED,
        )  # fmt: skip


_ELEMENTS = 4096  # numbers that a program reads at once: 16 KB of float32
_WARPS = 8

# Columns of a program: few where all are few, so that many programs read.
_NARROW, _FEW_COLUMNS, _MANY_COLUMNS = 2048, 4, 16
if INTERPRETED:  # the interpreter runs programs one after another
    _FEW_COLUMNS = _MANY_COLUMNS = 64


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    weight_grads, q_sum, k_sum, programs, q_size, k_size, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the programs' rows (grid: groups of columns)."""
    size = q_size + k_size
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = (row < programs)[:, None] & (column < size)[None, :]
        at = weight_grads + row[:, None].to(tl.int64) * size + column[None, :]
        total += tl.load(at, mask=valid, other=0.0)
    sums = tl.sum(total, axis=0)
    is_q = column < q_size
    tl.store(q_sum + column, sums.to(q_sum.dtype.element_ty), mask=is_q)
    is_k = (column >= q_size) & (column < size)
    tl.store(k_sum + column - q_size, sums.to(k_sum.dtype.element_ty), mask=is_k)


_sum_launcher = Launcher(sum_kernel)


def sum_programs(
    partial_sums: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of both weights, in their shapes and dtypes, by one launch.

    The rows are always added in the same order, so equal inputs have equal gradients.

    Args:
        partial_sums: A row for each program, float32 `[programs, weights of q and then of k]`.
        q_weight: The weight of queries.
        k_weight: The weight of keys.
    """
    if not len(partial_sums):
        return torch.zeros_like(q_weight), torch.zeros_like(k_weight)
    sums = torch.empty_like(q_weight), torch.empty_like(k_weight)
    sizes = (len(partial_sums), q_weight.numel(), k_weight.numel())
    key = (*sizes, q_weight.dtype, k_weight.dtype, partial_sums.device)
    _sum_launcher(key, (partial_sums, *sums), 0, _sum_spec, sizes)
    return sums


def _sum_spec(sizes: tuple[int, int, int]) -> LaunchSpec:
    width = sizes[1] + sizes[2]
    columns = _FEW_COLUMNS if width <= _NARROW else _MANY_COLUMNS
    tile = {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}
    return LaunchSpec((triton.cdiv(width, columns), 1, 1), sizes, tile, _WARPS)
