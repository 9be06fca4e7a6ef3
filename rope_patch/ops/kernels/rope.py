"""The op `rope`: queries and keys rotated to their positions, in one launch.

From the inside out: the Triton kernel, its launch, the autograd function for eager mode, and the
custom op for compiled and exported graphs. A custom op costs several times the Python of an
autograd function, but a graph does not pay it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

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
from rope_patch.ops.kernels.tile import (
    angles,
    attention_factor,
    read_rows,
    rotate,
    row_and_token,
    store_rows,
    widen_pairs,
)
from rope_patch.ops.validation import validate_shapes

# -- kernel ----------------------------------------------------------------------------------------


@triton.jit
def _token_rows(
    q, k, q_h, k_h, q_d, k_d, H, K, row, KEYS: tl.constexpr, DENSE: tl.constexpr,
    ALIGNED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Return heads from `row` on, keys after queries: pointers, a mask, strides of dimensions."""
    # `q` and `k` point at the token. The pointers and the mask are `[HEADS, 1]`.
    rows = (row + tl.arange(0, HEADS))[:, None].to(tl.int64)
    if KEYS:
        is_q = rows < H
        start = tl.where(is_q, q, k - H.to(tl.int64) * k_h) + rows * tl.where(is_q, q_h, k_h)
        # Triton 3.8 and 3.9 do not infer it, and would access 2 bytes at a time. All make a single
        # row a scalar, which must not carry a claim for two dimensions.
        if ALIGNED and HEADS > 1:
            start = tl.multiple_of(start, (1, 16))
        # A constant tells the compiler that the dimensions are neighbours.
        return start, rows < H + K, 1 if DENSE else tl.where(is_q, q_d, k_d)
    else:
        return q + rows * q_h, rows < H, q_d


@triton.jit
def rotate_tile(
    raw1, raw2, q, k, q_out, k_out, q_h, k_h, q_d, k_d, qo_h, ko_h, qo_d, ko_d, H, K, row, cos, sin,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, KEYS: tl.constexpr,
    DENSE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rotate and store a tile whose pairs `read_rows` has read."""
    first, second = widen_pairs(raw1, raw2, PAIRS, HEADS, INTERLEAVED)
    first, second = rotate(first, second, cos, sin)
    target, valid, target_d = _token_rows(
        q_out, k_out, qo_h, ko_h, qo_d, ko_d, H, K, row, KEYS, DENSE, ALIGNED, HEADS
    )
    store_rows(target, valid, first, second, target_d, R, PAIRS, HEADS, INTERLEAVED)
    if UNROTATED > 0:
        source, _, d = _token_rows(q, k, q_h, k_h, q_d, k_d, H, K, row, KEYS, DENSE, ALIGNED, HEADS)
        column = (R + tl.arange(0, UNROTATED))[None, :]
        valid = valid & (column < D)
        tl.store(target + column * target_d, tl.load(source + column * d, mask=valid), mask=valid)


@triton.jit(
    do_not_specialize=["S", "H", "K", "positions_a", "positions_b", "positions_s", "freqs_b"],
    do_not_specialize_on_alignment=["positions", "packed_freqs", "sections"],
)
def rope_kernel(
    q, k, q_out, k_out, positions, packed_freqs, sections,
    S, H, K,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    positions_a, positions_b, positions_s, freqs_b,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
    SECTIONS: tl.constexpr, KEYS: tl.constexpr, DENSE: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Rotate one token, or one tile of its heads if ONE_TILE (grid: tokens, tiles).

    Queries and keys are one list of heads, which a tile may hold both of, and the angles are
    computed once for them. The backward pass negates the angle, because the rotation is orthogonal
    up to the attention factor.
    """
    b, s = row_and_token(tl.program_id(0), S, ROWS)
    packed_freqs += b * freqs_b
    positions += b * positions_b + s * positions_s
    q += b * q_b + s * q_s
    q_out += b * qo_b + s * qo_s
    k += b * k_b + s * k_s
    k_out += b * ko_b + s * ko_s
    row = tl.program_id(1) * HEADS
    # The first tile is read while the angles are computed.
    start, valid, d = _token_rows(q, k, q_h, k_h, q_d, k_d, H, K, row, KEYS, DENSE, ALIGNED, HEADS)
    raw1, raw2 = read_rows(start, valid, d, R, PAIRS, INTERLEAVED)
    cos, sin = angles(positions, packed_freqs, sections, positions_a, SECTIONS, R, PAIRS)
    factor = attention_factor(packed_freqs, R)
    cos *= factor
    sin *= factor
    if CONJUGATE:
        sin = -sin
    rotate_tile(
        raw1, raw2, q, k, q_out, k_out, q_h, k_h, q_d, k_d, qo_h, ko_h, qo_d, ko_d, H, K, row,
        cos, sin, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, KEYS, DENSE, ALIGNED,
    )  # fmt: skip
    if not ONE_TILE:
        for row in range(HEADS, H + (K if KEYS else 0), HEADS):
            start, valid, d = _token_rows(
                q, k, q_h, k_h, q_d, k_d, H, K, row, KEYS, DENSE, ALIGNED, HEADS
            )
            raw1, raw2 = read_rows(start, valid, d, R, PAIRS, INTERLEAVED)
            rotate_tile(
                raw1, raw2, q, k, q_out, k_out, q_h, k_h, q_d, k_d, qo_h, ko_h, qo_d, ko_d, H, K,
                row, cos, sin, D, R, PAIRS, UNROTATED, HEADS, INTERLEAVED, KEYS, DENSE,
                ALIGNED,
            )  # fmt: skip


# -- launch ----------------------------------------------------------------------------------------

# Strides of results for queries and for keys; None: like the input.
Layouts: TypeAlias = "tuple[tuple[int, ...] | None, tuple[int, ...] | None]"

_launcher = Launcher(rope_kernel)


def launch(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    conjugate: bool,
    inplace: bool = False,
    layouts: Layouts = (None, None),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel; its results equal `rope_patch.ops.reference.rope`.

    Args:
        inplace: Overwrite q and k.
        layouts: Strides of the results; None: like q or k.
    """
    if k is not None and k.dtype != q.dtype:  # a tile has one dtype
        settings = (interleaved, heads_dim, conjugate, inplace)
        alone = (positions, packed_freqs, sections, *settings)
        return (
            launch(q, None, *alone, (layouts[0], None))[0],
            launch(k, None, *alone, (layouts[1], None))[0],
        )
    q_out = q if inplace else _empty(q, layouts[0])
    k_out: torch.Tensor | None = k if k is None or inplace else _empty(k, layouts[1])
    # Without keys, the kernel does not read these pointers.
    keys = q if k is None else k
    keys_out = q_out if k_out is None else k_out
    axes = packed_freqs if sections is None else sections
    key = (
        q.shape, q.stride(), q.dtype, keys.shape, keys.stride(), keys.dtype, k is None,
        positions.shape, positions.stride(), positions.dtype,
        packed_freqs.shape, packed_freqs.stride(), packed_freqs.dtype,
        None if sections is None else (sections.shape, sections.stride(), sections.dtype),
        q.device, keys.device, positions.device, packed_freqs.device, interleaved, heads_dim,
        conjugate, inplace, layouts,
    )  # fmt: skip

    if q.numel() or (k is not None and k.numel()):
        address_bits = q.data_ptr() | keys.data_ptr()
        tensors = (q, keys, q_out, keys_out, positions, packed_freqs, axes)
        settings = (interleaved, heads_dim, conjugate, inplace)
        _launcher(
            key, tensors, address_bits, _make_spec, q, k, q_out, keys_out, positions, packed_freqs,
            sections, settings,
        )  # fmt: skip
    return q_out, k_out


def _empty(x: torch.Tensor, layout: tuple[int, ...] | None) -> torch.Tensor:
    if layout is None:
        return torch.empty_like(x)
    return torch.empty_strided(x.shape, layout, dtype=x.dtype, device=x.device)


def _make_spec(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_out: torch.Tensor,
    keys_out: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    settings: tuple[bool, int, bool, bool],
) -> LaunchSpec:
    interleaved, heads_dim, conjugate, inplace = settings
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim)
    keys = q if k is None else k
    tokens, heads, key_heads = q.shape[3 - heads_dim], q.shape[heads_dim], keys.shape[heads_dim]
    all_heads = heads if k is None else heads + key_heads
    sizes = tile_sizes(q.shape[-1], 2 * (packed_freqs.shape[-1] - 1), all_heads)
    default = head_splits(q.shape[0] * tokens, (all_heads,), sizes, may_widen=True)
    counts = (heads, 0 if k is None else key_heads)
    tiles, warps, stages = apply_choice(
        "rope", q, q.shape[0] * tokens, counts, (all_heads,), sizes, default
    )
    if inplace:
        sizes["UNROTATED"] = 0  # in place, these dimensions need no copy
    scalars = [tokens, heads, key_heads]
    for x in (q, keys, q_out, keys_out):
        scalars += strides(x, heads_dim)
    return LaunchSpec(
        (q.shape[0] * tokens, tiles, 1),
        (*scalars, *position_strides(positions), row_stride(packed_freqs)),
        {
            **sizes,
            "INTERLEAVED": interleaved,
            "CONJUGATE": conjugate,
            "SECTIONS": sections is not None,
            "KEYS": k is not None,
            "DENSE": all(x.stride(-1) == 1 for x in (q, keys, q_out, keys_out)),
            "ALIGNED": all(map(_is_aligned, (q, keys, q_out, keys_out))),
            "ROWS": rows_kind(q.shape[0], tokens),
            "ONE_TILE": tiles * sizes["HEADS"] >= all_heads,
        },
        warps,
        stages,
    )


def _is_aligned(x: torch.Tensor) -> bool:
    """Return whether all heads start at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])


# -- autograd function, for eager mode -------------------------------------------------------------


class RopeFunction(torch.autograd.Function):
    """Rotation; its gradient is the backward rotation, and so on for higher derivatives.

    Gradients get the memory layout of q and k, whatever that of the incoming gradients is: then the
    view that split a projection into heads passes its gradient on without a copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        positions: torch.Tensor,
        packed_freqs: torch.Tensor,
        sections: torch.Tensor | None,
        interleaved: bool,
        heads_dim: int,
        conjugate: bool,
        inplace: bool,
        layouts: Layouts = (None, None),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(positions, packed_freqs, sections)
        ctx.set_materialize_grads(False)
        ctx.settings = (interleaved, heads_dim, not conjugate)
        if inplace:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        rotated = launch(
            q, k, positions, packed_freqs, sections, interleaved, heads_dim, conjugate, inplace,
            layouts,
        )  # fmt: skip
        # In place, q and k are no views, and second derivatives can have any layout.
        keeps = not inplace and layouts == (None, None)
        ctx.layouts = tuple(x.stride() if keeps and x is not None else None for x in rotated)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        needed_grads = [g if n else None for g, n in zip(grads, ctx.needs_input_grad)]  # noqa: B905
        rotated = _rotate_grads(*needed_grads, *ctx.saved_tensors, *ctx.settings, ctx.layouts)
        return *rotated, None, None, None, None, None, None, None, None


def _rotate_grads(
    q: torch.Tensor | None, k: torch.Tensor | None, *rest_and_layouts: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rotate those of the two gradients that exist, in one launch."""
    *rest, layouts = rest_and_layouts
    if q is None:
        if k is None:
            return None, None
        return None, RopeFunction.apply(k, None, *rest, False, (layouts[1], None))[0]
    return RopeFunction.apply(q, k, *rest, False, layouts)


# -- custom op, for graphs -------------------------------------------------------------------------


@torch.library.custom_op("rope_patch::rope", mutates_args=())
def rope_op(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    conjugate: bool,
) -> list[torch.Tensor]:
    """Return rotated queries, and keys if there are any."""
    rotated = launch(q, k, positions, packed_freqs, sections, interleaved, heads_dim, conjugate)
    return [x for x in rotated if x is not None]


@rope_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor | None, *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in (q, k) if x is not None]


def _rope_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, positions, packed_freqs, sections, interleaved, heads_dim, conjugate = inputs
    ctx.save_for_backward(positions, packed_freqs, sections)
    ctx.settings = (interleaved, heads_dim, not conjugate)


def _rope_backward(ctx: Any, grads: list[torch.Tensor | None]) -> Any:
    q, k = (*grads, None)[:2]
    rest = (*ctx.saved_tensors, *ctx.settings)
    if q is None:
        rotated: Any = [None, None if k is None else rope_op(k, None, *rest)[0]]
    else:
        rotated = [*rope_op(q, k, *rest), None][:2]
    return *rotated, None, None, None, None, None, None


rope_op.register_autograd(_rope_backward, setup_context=_rope_setup_context)
