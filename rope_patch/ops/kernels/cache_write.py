"""Queries and keys normed and rotated, keys and values written into a cache, in one launch.

There are no gradients: it is for decoding with a cache whose memory is allocated beforehand.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from rope_patch.ops.kernels.launcher import (
    Launcher,
    LaunchSpec,
    head_splits,
    position_strides,
    row_stride,
    strides,
    tile_sizes,
)
from rope_patch.ops.kernels.qk_norm_rope import WARPS_ALL_HEADS, make_constexprs
from rope_patch.ops.kernels.qk_norm_rope_kernels import cos_sin_of_token, norm_and_rotate
from rope_patch.ops.kernels.rope import rotate_tile
from rope_patch.ops.kernels.tile import read_pairs, row_and_token
from rope_patch.ops.validation import validate_cache, validate_shapes

# -- kernel ----------------------------------------------------------------------------------------


@triton.jit
def _copy_tile(
    values, cache, heads, written, v_h, v_d, vc_h, vc_d, row, D: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Copy values of heads from `row` on; the first `written` of all heads are stored."""
    rows = (row + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_read, is_written = rows < heads, rows < written
    if D != COLUMNS:
        is_read = is_read & (column < D)
        is_written = is_written & (column < D)
    head = rows.to(tl.int64)
    x = tl.load(values + head * v_h + column * v_d, mask=is_read)
    tl.store(cache + head * vc_h + column * vc_d, x, mask=is_written)


@triton.jit
def _rotate_heads(
    x, weight, out, heads, written, fits, x_h, x_d, out_h, out_d, first_row,
    positions, packed_freqs, sections, positions_a, eps,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr, OFFSET: tl.constexpr,
    NORM_ALL_HEADS: tl.constexpr, NORM: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Rotate and store a tile of a token's heads and, unless ONE_TILE, the tiles after it."""
    # The first `written` of the heads are stored: as NaN if the token does not fit into the cache.
    # The first tile is read while the angles are computed and the cache's length is read.
    raw1, raw2 = read_pairs(x, heads, x_h, x_d, first_row, R, PAIRS, HEADS, INTERLEAVED)
    cos, sin = cos_sin_of_token(positions, packed_freqs, sections, positions_a, SECTIONS, R, PAIRS)
    cos = tl.where(fits, cos, float("nan"))
    sin = tl.where(fits, sin, float("nan"))
    if NORM:
        norm_and_rotate(
            raw1, raw2, x, weight, out, out, heads, written, x_h, x_d, out_h, out_d, first_row, cos,
            sin, eps, OFFSET, NORM_ALL_HEADS, False, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED,
            True, ONE_TILE or NORM_ALL_HEADS,
        )  # fmt: skip
    else:
        rotate_tile(
            raw1, raw2, x, x, out, out, x_h, x_h, x_d, x_d, out_h, out_h, out_d, out_d, written,
            0, first_row, cos, sin, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, False, False, False,
        )  # fmt: skip
        if not ONE_TILE:
            for row in range(first_row + HEADS, heads, HEADS):
                raw1, raw2 = read_pairs(x, heads, x_h, x_d, row, R, PAIRS, HEADS, INTERLEAVED)
                rotate_tile(
                    raw1, raw2, x, x, out, out, x_h, x_h, x_d, x_d, out_h, out_h, out_d, out_d,
                    written, 0, row, cos, sin, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, False,
                    False, False,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "S", "H", "K", "slots", "positions_a", "positions_b", "positions_s", "freqs_b",
    ],
    do_not_specialize_on_alignment=["start", "positions", "packed_freqs", "sections"],
)  # fmt: skip
def write_kernel(
    q, k, values, q_weight, k_weight, q_out, key_cache, value_cache, start, positions, packed_freqs,
    sections, eps, S, H, K, slots,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    qo_b, qo_s, qo_h, qo_d, kc_b, kc_s, kc_h, kc_d, vc_b, vc_s, vc_h, vc_d,
    positions_a, positions_b, positions_s, freqs_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SECTIONS: tl.constexpr, OFFSET: tl.constexpr,
    NORM_ALL_HEADS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, ONE_TILE: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, VALUE_HEADS: tl.constexpr, ONE_VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries or its keys, or copy its values (grid: tokens, tiles).

    Tiles are those of queries, then of keys, then of values. Without ONE_TILE and ONE_VALUE_TILE,
    each of the three is one program.
    """
    b, s = row_and_token(tl.program_id(0), S, ROWS)
    slot = tl.load(start).to(tl.int64) + s
    fits = (slot >= 0) & (slot < slots)
    written = tl.where(fits, K, 0)
    packed_freqs += b * freqs_b
    positions += b * positions_b + s * positions_s
    tile = tl.program_id(1)
    if tile < Q_TILES:
        _rotate_heads(
            q + b * q_b + s * q_s, q_weight, q_out + b * qo_b + s * qo_s, H, H, fits, q_h, q_d,
            qo_h, qo_d, tile * HEADS, positions, packed_freqs, sections, positions_a, eps,
            D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, SECTIONS, OFFSET, NORM_ALL_HEADS, NORM,
            ONE_TILE,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        _rotate_heads(
            k + b * k_b + s * k_s, k_weight, key_cache + b * kc_b + slot * kc_s, K, written, fits,
            k_h, k_d, kc_h, kc_d, (tile - Q_TILES) * HEADS, positions, packed_freqs, sections,
            positions_a, eps, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, SECTIONS, OFFSET,
            NORM_ALL_HEADS, NORM, ONE_TILE,
        )  # fmt: skip
    else:
        values += b * v_b + s * v_s
        value_cache += b * vc_b + slot * vc_s
        row = (tile - Q_TILES - K_TILES) * VALUE_HEADS
        _copy_tile(
            values, value_cache, K, written, v_h, v_d, vc_h, vc_d, row, VALUE_DIM, VALUE_COLUMNS,
            VALUE_HEADS,
        )  # fmt: skip
        if not ONE_VALUE_TILE:
            for row in range(VALUE_HEADS, K, VALUE_HEADS):
                _copy_tile(
                    values, value_cache, K, written, v_h, v_d, vc_h, vc_d, row, VALUE_DIM,
                    VALUE_COLUMNS, VALUE_HEADS,
                )  # fmt: skip


# -- launch ----------------------------------------------------------------------------------------

_launcher = Launcher(write_kernel)


# Weights of both RMSNorms, eps and offset; see `rope_patch.ops.qk_norm_rope`.
Norms: TypeAlias = "tuple[torch.Tensor, torch.Tensor, float, float]"


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    norms: Norms | None,
    interleaved: bool,
    heads_dim: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel; it does what `rope_patch.ops.rope_into_cache` says, in checked shapes.

    Args:
        out: Where to write queries, which may be q itself; None: new memory.
    """
    q_out = torch.empty_like(q) if out is None else out
    # Without norms, the kernel does not read these pointers.
    q_weight, k_weight = (q, k) if norms is None else norms[:2]
    key = (
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), values.shape, values.stride(),
        q_out.shape, q_out.stride(), q_out.dtype, key_cache.shape, key_cache.stride(),
        value_cache.shape, value_cache.stride(), start.shape, start.dtype,
        None if norms is None else (
            q_weight.shape, q_weight.stride(), q_weight.dtype, k_weight.shape, k_weight.stride(),
            k_weight.dtype, *norms[2:],
        ),
        positions.shape, positions.stride(), positions.dtype,
        packed_freqs.shape, packed_freqs.stride(), packed_freqs.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device, k.device, values.device, key_cache.device, value_cache.device, q_out.device,
        start.device, q_weight.device, k_weight.device, positions.device, packed_freqs.device,
        interleaved, heads_dim,
    )  # fmt: skip

    if q.numel():
        address_bits = (
            q.data_ptr() | k.data_ptr() | values.data_ptr() | q_out.data_ptr()
            | q_weight.data_ptr() | k_weight.data_ptr()
            | key_cache.data_ptr() | value_cache.data_ptr()
        )  # fmt: skip
        axes = packed_freqs if sections is None else sections
        tensors = (
            q, k, values, q_weight, k_weight, q_out, key_cache, value_cache, start, positions,
            packed_freqs, axes,
        )  # fmt: skip
        settings = (norms, interleaved, heads_dim)
        _launcher(key, tensors, address_bits, _make_spec, tensors, sections, settings)
    return q_out


def _make_spec(
    tensors: tuple[torch.Tensor, ...], sections: torch.Tensor | None, settings: tuple[Any, ...]
) -> LaunchSpec:
    (
        q, k, values, q_weight, k_weight, q_out, key_cache, value_cache, start, positions,
        packed_freqs, _,
    ) = tensors  # fmt: skip
    norms, interleaved, heads_dim = settings
    weights = () if norms is None else (q_weight, k_weight)
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, *weights)
    validate_cache(q, k, values, key_cache, value_cache, start, q_out, heads_dim)
    norm_all_heads = norms is not None and q_weight.ndim == 2
    tokens = q.shape[0] * q.shape[3 - heads_dim]
    heads, key_heads = q.shape[heads_dim], k.shape[heads_dim]
    constexprs = make_constexprs(
        q, k, packed_freqs, sections, 0.0 if norms is None else norms[3], interleaved,
        heads_dim, norm_all_heads,
    )  # fmt: skip
    programs, warps = head_splits(
        tokens, (heads, key_heads), constexprs, has_norms=norms is not None
    )
    is_split = programs > 1
    q_tiles, k_tiles = (
        triton.cdiv(count, constexprs["HEADS"]) if is_split else 1 for count in (heads, key_heads)
    )
    value_dim = values.shape[-1]
    value_sizes: dict[str, Any] = dict(tile_sizes(value_dim, value_dim, key_heads))
    if norm_all_heads:
        # With more warps, a smaller tile would be narrower than 16 bytes a thread.
        value_sizes["HEADS"], value_tiles = constexprs["HEADS"], 1
    else:
        value_tiles, _ = head_splits(tokens, (key_heads,), value_sizes)
    scalars = [0.0 if norms is None else norms[2], q.shape[3 - heads_dim], heads, key_heads]
    scalars.append(key_cache.shape[2])
    for x in (q, k, values, q_out):
        scalars += strides(x, heads_dim)
    for x in (key_cache, value_cache):
        scalars += strides(x, 1)
    return LaunchSpec(
        (tokens, q_tiles + k_tiles + value_tiles, 1),
        (*scalars, *position_strides(positions), row_stride(packed_freqs)),
        {
            **constexprs,
            "NORM": norms is not None,
            "Q_TILES": q_tiles,
            "K_TILES": k_tiles,
            "ONE_TILE": is_split,
            "VALUE_DIM": value_dim,
            "VALUE_COLUMNS": triton.next_power_of_2(value_dim),
            "VALUE_HEADS": value_sizes["HEADS"],
            "ONE_VALUE_TILE": value_tiles * value_sizes["HEADS"] >= key_heads,
        },
        WARPS_ALL_HEADS if norm_all_heads else warps,
    )
