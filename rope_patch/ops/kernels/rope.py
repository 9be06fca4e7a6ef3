"""Queries and keys rotated to their positions, in one launch."""

from __future__ import annotations

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
    factor_of,
    load_pairs,
    round_fairly,
    store_pairs,
    tail_at,
    turn,
)
from rope_patch.ops.validation import validate_shapes


@triton.jit
def _rotate(
    x, out, heads, x_h, x_d, out_h, out_d, row, cos, sin, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    FAIR: tl.constexpr,
):  # fmt: skip
    first, second = load_pairs(x, heads, x_h, x_d, row, R, PAIRS, HEADS, INTERLEAVED)
    first, second = turn(first, second, cos, sin)
    if FAIR:
        first = round_fairly(first, out.dtype.element_ty)
        second = round_fairly(second, out.dtype.element_ty)
    store_pairs(out, first, second, heads, out_h, out_d, row, R, PAIRS, HEADS, INTERLEAVED)
    if TAIL > 0:
        source, real = tail_at(x, heads, x_h, x_d, row, D, R, TAIL, HEADS)
        target, _ = tail_at(out, heads, out_h, out_d, row, D, R, TAIL, HEADS)
        tl.store(target, tl.load(source, mask=real), mask=real)


@triton.jit(
    do_not_specialize=["S", "H", "K", "positions_a", "positions_b", "positions_s", "turns_b"],
    do_not_specialize_on_alignment=["positions", "turns", "sections"],
)
def rope_kernel(
    q, k, q_out, k_out, positions, turns, sections,
    S, H, K,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    positions_a, positions_b, positions_s, turns_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
    SECTIONS: tl.constexpr, KEYS: tl.constexpr, FAIR: tl.constexpr,
):  # fmt: skip
    """One program a token, or several with a share of its heads each (grid: tokens, shares).

    The angles are computed once and serve all heads of queries and keys. Backwards is the same
    with the angle negated, as the rotation is orthogonal but for the attention factor. FAIR is for
    keys that are turned many times: see `rope_patch.ops.reference.rerotate_`.
    """
    b = (tl.program_id(0) // S).to(tl.int64)
    s = (tl.program_id(0) % S).to(tl.int64)
    turns += b * turns_b
    positions += b * positions_b + s * positions_s
    cos, sin = angles(positions, turns, sections, positions_a, SECTIONS, R, PAIRS)
    factor = factor_of(turns, R)
    cos *= factor
    sin *= factor
    if CONJUGATE:
        sin = -sin
    share = tl.program_id(1) * HEADS
    step = tl.num_programs(1) * HEADS
    q += b * q_b + s * q_s
    q_out += b * qo_b + s * qo_s
    for row in range(share, H, step):
        _rotate(
            q, q_out, H, q_h, q_d, qo_h, qo_d, row, cos, sin, D, R, PAIRS, TAIL, HEADS,
            INTERLEAVED, FAIR,
        )  # fmt: skip
    if KEYS:
        k += b * k_b + s * k_s
        k_out += b * ko_b + s * ko_s
        for row in range(share, K, step):
            _rotate(
                k, k_out, K, k_h, k_d, ko_h, ko_d, row, cos, sin, D, R, PAIRS, TAIL, HEADS,
                INTERLEAVED, FAIR,
            )  # fmt: skip


_launcher = Launcher(rope_kernel)


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    turns: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    conjugate: bool,
    inplace: bool = False,
    fair: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launches the kernel; see `rope_patch.ops.reference.rope`, which it equals.

    Args:
        inplace: Write over what goes in.
        fair: Round as `rope_patch.ops.reference.rerotate_` does.
    """
    q_out = q if inplace else torch.empty_like(q)
    keys, keys_out = q, q_out  # pointers that nothing reads where there are no keys
    k_out = None
    if k is not None:
        keys = k
        keys_out = k_out = k if inplace else torch.empty_like(k)
    axes = turns if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, keys.shape, keys.stride(), keys.dtype, k is None,
        positions.shape, positions.stride(), positions.dtype, turns.shape, turns.stride(),
        turns.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device.index, interleaved, heads_dim, conjugate, inplace, fair,
    )  # fmt: skip

    if q.numel() or (k is not None and k.numel()):
        bits = q.data_ptr() | keys.data_ptr()
        tensors = (q, keys, q_out, keys_out, positions, turns, axes)
        how = (interleaved, heads_dim, conjugate, inplace, fair)
        _launcher(key, tensors, bits, _plan, q, k, q_out, keys_out, positions, turns, sections, how)
    return q_out, k_out


def _plan(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_out: torch.Tensor,
    keys_out: torch.Tensor,
    positions: torch.Tensor,
    turns: torch.Tensor,
    sections: torch.Tensor | None,
    how: tuple[bool, int, bool, bool, bool],
) -> Plan:
    interleaved, heads_dim, conjugate, inplace, fair = how
    validate_shapes(q, k, positions, turns, sections, heads_dim)
    keys = q if k is None else k
    tokens, heads, key_heads = q.shape[3 - heads_dim], q.shape[heads_dim], keys.shape[heads_dim]
    many = max(heads, key_heads)
    sizes = tile(q.shape[-1], 2 * (turns.shape[-1] - 1), many)
    if inplace:
        sizes["TAIL"] = 0  # stands where it is to be
    numbers = [tokens, heads, key_heads]
    for x in (q, keys, q_out, keys_out):
        numbers += strides(x, heads_dim)
    return Plan(
        (q.shape[0] * tokens, shares(q.shape[0] * tokens, many, sizes["HEADS"]), 1),
        (*numbers, *position_strides(positions), row_stride(turns)),
        {
            **sizes,
            "INTERLEAVED": interleaved,
            "CONJUGATE": conjugate,
            "SECTIONS": sections is not None,
            "KEYS": k is not None,
            "FAIR": fair,
        },
    )
