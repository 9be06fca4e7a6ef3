"""The op `rerotate_`: cached keys of many layers re-rotated in place, in one launch.

The heads of all layers are one list, so that narrow layers share a tile. The layers of a cache are
separate allocations, so the kernel reads their addresses from a table on the device. Offsets from
the first layer would do on NVIDIA's GPUs. But Triton tells AMD's compiler that offsets from an
argument of less than 2 GB have 32 bits, and layers can be further apart. An address that was read
is no argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from rope_patch.ops.kernels.launcher import (
    Launcher,
    LaunchSpec,
    position_strides,
    row_stride,
    rows_kind,
    strides,
    tile_sizes,
)
from rope_patch.ops.kernels.tile import (
    angles,
    attention_factor,
    read_rows,
    rotate,
    row_and_token,
    stochastic_round,
    store_rows,
    widen_pairs,
)
from rope_patch.ops.modes import copy_to_device
from rope_patch.ops.validation import validate_shapes

_ALIGNMENT = 16  # bytes of the widest access

# A program takes several tiles, which share its angles, where so many programs are left.
_MOST_TILES, _LEAST_PROGRAMS = 4, 16384

# -- kernel ----------------------------------------------------------------------------------------


@triton.jit
def _read_tile(
    keys, addresses, offset, layers, H, k_h, k_d, row, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, LAYERS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return pointers to heads from `row` on, `[HEADS, 1]`, a mask, and the pairs there."""
    rows = (row + tl.arange(0, HEADS))[:, None]
    valid = rows < layers * H
    if LAYERS == "one":
        start = keys + offset + rows.to(tl.int64) * k_h
    else:
        if LAYERS == "one a tile":
            start = tl.load(addresses + row // H).to(keys.dtype)
            if ALIGNED:
                start = tl.multiple_of(start, 16)
        else:
            start = tl.load(addresses + rows // H, mask=valid, other=0).to(keys.dtype)
            if ALIGNED:
                start = tl.multiple_of(start, [16, 16])
        start = start + offset + (rows % H).to(tl.int64) * k_h
    raw1, raw2 = read_rows(start, valid, k_d, R, PAIRS, INTERLEAVED)
    return start, valid, raw1, raw2


@triton.jit
def _rerotate_tile(
    start, valid, raw1, raw2, k_d, cos, sin, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate, round stochastically and store what `_read_tile` returns."""
    first, second = widen_pairs(raw1, raw2, PAIRS, HEADS, INTERLEAVED)
    first, second = rotate(first, second, cos, sin)
    first = stochastic_round(first, start.dtype.element_ty)
    second = stochastic_round(second, start.dtype.element_ty)
    store_rows(start, valid, first, second, k_d, R, PAIRS, HEADS, INTERLEAVED)


@triton.jit(
    do_not_specialize=["layers", "S", "H", "positions_b", "positions_s", "freqs_b"],
    do_not_specialize_on_alignment=["addresses", "positions", "packed_freqs"],
)
def rerotate_kernel(
    keys, addresses, positions, packed_freqs, layers, S, H, k_b, k_s, k_h, k_d,
    positions_b, positions_s, freqs_b,
    R: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    LAYERS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Re-rotate TILES tiles of a token's heads in all layers (grid: tokens, shares of the tiles).

    LAYERS is "one", which is `keys`, or "one a tile" or "several a tile". These start at their
    entries of `addresses`, multiples of 16 if ALIGNED, and `keys` tells the dtype alone.
    """
    b, s = row_and_token(tl.program_id(0), S, ROWS)
    offset = b * k_b + s * k_s
    row = tl.program_id(1) * TILES * HEADS
    # The first tile is read while the angles are computed.
    start, valid, raw1, raw2 = _read_tile(
        keys, addresses, offset, layers, H, k_h, k_d, row, R, PAIRS, HEADS, INTERLEAVED, LAYERS,
        ALIGNED,
    )  # fmt: skip
    packed_freqs += b * freqs_b
    positions += b * positions_b + s * positions_s
    cos, sin = angles(positions, packed_freqs, packed_freqs, 0, False, R, PAIRS)
    factor = attention_factor(packed_freqs, R)
    cos *= factor
    sin *= factor
    _rerotate_tile(start, valid, raw1, raw2, k_d, cos, sin, R, PAIRS, HEADS, INTERLEAVED)
    if TILES > 1:
        end = tl.minimum(row + TILES * HEADS, layers * H)
        for next_row in range(row + HEADS, end, HEADS):
            start, valid, raw1, raw2 = _read_tile(
                keys, addresses, offset, layers, H, k_h, k_d, next_row, R, PAIRS, HEADS,
                INTERLEAVED, LAYERS, ALIGNED,
            )  # fmt: skip
            _rerotate_tile(start, valid, raw1, raw2, k_d, cos, sin, R, PAIRS, HEADS, INTERLEAVED)


# -- launch ----------------------------------------------------------------------------------------

_launcher = Launcher(rerotate_kernel)


def group_layers(layers: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the layers in groups that one launch each can take, in their order.

    A group has one device, shape, dtype and strides. Keys that are in the list twice are in two
    groups, because a launch would change them in both places at once. While a CUDA graph is
    captured, every layer is a group: the graph would keep the address of the table, not the table.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    earlier: dict[int, int] = {}
    for keys in layers:
        address = keys.data_ptr()
        count = earlier[address] = earlier.get(address, 0) + 1
        kind = (count, keys.shape, keys.stride(), keys.dtype, keys.device)
        groups.setdefault(kind, []).append(keys)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return [[keys] for group in groups.values() for keys in group]
    return list(groups.values())


def launch(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    interleaved: bool,
) -> None:
    """Launch the kernel; its results equal `rope_patch.ops.reference.rerotate_`.

    Args:
        layers: One of the groups of `group_layers`, keys `[B, K, S, D]`.
        positions: `[S]`, `[1, S]` or `[B, S]`.
        packed_freqs: The difference of frequencies; see `rerotation_frequencies`.
        interleaved: See `rope_patch.ops.rope`.
    """
    keys = layers[0]
    if not keys.numel():
        return
    addresses = [layer.data_ptr() for layer in layers]
    address_bits = 0
    for address in addresses:
        address_bits |= address
    has_table = len(layers) > 1
    table = _table(addresses, keys.device) if has_table else packed_freqs
    key = (
        keys.shape, keys.stride(), keys.dtype, len(layers), interleaved, keys.device,
        positions.shape, positions.stride(), positions.dtype, positions.device,
        packed_freqs.shape, packed_freqs.stride(), packed_freqs.dtype, packed_freqs.device,
    )  # fmt: skip
    is_aligned = address_bits % _ALIGNMENT == 0
    _launcher(
        key, (keys, table, positions, packed_freqs), address_bits, _make_spec, keys, len(layers),
        positions, packed_freqs, interleaved, is_aligned,
    )  # fmt: skip


def _table(addresses: list[int], device: torch.device) -> torch.Tensor:
    """Return the layers' addresses on the device."""
    # On one stream come the copy, then the kernel, then whatever gets the table's memory next.
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    return copy_to_device(table, device)


def _make_spec(
    keys: torch.Tensor,
    layers: int,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    interleaved: bool,
    is_aligned: bool,
) -> LaunchSpec:
    validate_shapes(keys, None, positions, packed_freqs, None, 1)
    batch, heads, tokens, _ = keys.shape
    rotary_dim = 2 * (packed_freqs.shape[-1] - 1)
    sizes = tile_sizes(rotary_dim, rotary_dim, layers * heads)
    tiles = triton.cdiv(layers * heads, sizes["HEADS"])
    most = max(1, min(_MOST_TILES, batch * tokens * tiles // _LEAST_PROGRAMS))
    programs = triton.cdiv(tiles, most)
    kind = "several a tile" if heads % sizes["HEADS"] else "one a tile"
    scalars = (layers, tokens, heads, *strides(keys, 1))
    return LaunchSpec(
        (batch * tokens, programs, 1),
        (*scalars, *position_strides(positions)[1:], row_stride(packed_freqs)),
        {
            **{name: sizes[name] for name in ("R", "PAIRS", "HEADS")},
            "INTERLEAVED": interleaved,
            "LAYERS": "one" if layers == 1 else kind,
            "ALIGNED": is_aligned,
            "ROWS": rows_kind(batch, tokens),
            "TILES": triton.cdiv(tiles, programs),  # the programs' shares are alike
        },
    )
