"""Building blocks of the kernels for a tile of heads: angles, loads, stores and rotation of pairs.

A tile has two parts `[HEADS, PAIRS]` in float32, the first and the second dimension of each rotated
pair, and a third part `[HEADS, UNROTATED]`, the dimensions that do not rotate. Sizes are padded to
powers of two, and the padding is masked.
"""

import triton
import triton.language as tl


@triton.jit
def cos_sin(phase):
    """Return cos and sin of an angle in units of 2^-64 turns, int64, to 1.2e-7.

    The two upper bits give the nearest quarter of a turn. The rest is at most an eighth of a turn,
    where the polynomials of Cephes' sinf and cosf hold.
    """
    upper = (phase >> 32).to(tl.int32)  # the rest is below float32's precision
    quarter = (upper + (1 << 29)) >> 30
    rest = (upper - (quarter << 30)).to(tl.float32)
    x = rest * 1.4629180792671596e-9  # 2 pi / 2^32
    x2 = x * x
    s = ((-1.9515295891e-4 * x2 + 8.3321608736e-3) * x2 - 1.6666654611e-1) * x2 * x + x
    c = ((2.443315711809948e-5 * x2 - 1.388731625493765e-3) * x2 + 4.166664568298827e-2) * x2
    c = c * x2 - 0.5 * x2 + 1.0
    odd = (quarter & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    sin = tl.where((quarter & 2) != 0, -sin, sin)
    return cos, sin


@triton.jit
def row_and_token(index, S, ROWS: tl.constexpr):
    """Return the row and the place in it of a token, by its index among all tokens, in int64.

    A division takes about as long as one read of memory, and all reads need its result. So there
    is none where ROWS is "one" or "of one token"; else it is "any".
    """
    zero = tl.full((), 0, tl.int64)
    if ROWS == "one":
        return zero, index + zero
    elif ROWS == "of one token":
        return index + zero, zero
    else:
        return index // S + zero, index % S + zero


@triton.jit
def attention_factor(packed_freqs, R: tl.constexpr):
    """Load the attention factor: the float32 bits after the frequencies."""
    return tl.load(packed_freqs + R // 2).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def angles(
    positions, packed_freqs, sections, axis_stride, SECTIONS: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Return cos and sin of one token, `[PAIRS]`, without the attention factor.

    `packed_freqs` points at the token's row, `positions` at the token on the first axis.
    """
    pair = tl.arange(0, PAIRS)
    valid = pair < R // 2
    freqs = tl.load(packed_freqs + pair, mask=valid, other=0)
    if SECTIONS:
        axis = tl.load(sections + pair, mask=valid, other=0).to(tl.int64)
        position = tl.load(positions + axis * axis_stride, mask=valid, other=0).to(tl.int64)
    else:
        position = tl.load(positions).to(tl.int64)
    cos, sin = cos_sin(position * freqs)
    # Each thread computes few angles and gets the others through shared memory. Without the sums
    # over one column, Triton lets each thread compute all angles that it uses.
    return tl.sum(cos[:, None], axis=1), tl.sum(sin[:, None], axis=1)


@triton.jit
def read_pairs(
    x, heads, head_stride, stride, row, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load heads from `row` on in their dtype, for `widen_pairs`: a load that can start early.

    `stride` is the stride of the head's dimensions.
    """
    rows = row + tl.arange(0, HEADS)
    start = x + rows[:, None].to(tl.int64) * head_stride
    return read_rows(start, (rows < heads)[:, None], stride, R, PAIRS, INTERLEAVED)


@triton.jit
def read_rows(
    start, valid, stride, R: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Do `read_pairs` for heads that start at the pointers `start`, `[HEADS, 1]`."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        if R != 2 * PAIRS:
            valid = valid & (column < R)[None, :]
        both = tl.load(start + column[None, :] * stride, mask=valid, other=0.0)
        return both, both
    else:
        pair = tl.arange(0, PAIRS)
        if R != 2 * PAIRS:
            valid = valid & (pair < R // 2)[None, :]
        at = start + pair[None, :] * stride
        first = tl.load(at, mask=valid, other=0.0)
        second = tl.load(at + (R // 2) * stride, mask=valid, other=0.0)
        return first, second


@triton.jit
def widen_pairs(first, second, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return what `read_pairs` loaded as two `[HEADS, PAIRS]` in float32."""
    if INTERLEAVED:
        return tl.split(tl.reshape(first.to(tl.float32), (HEADS, PAIRS, 2)))
    else:
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_pairs(
    x, heads, head_stride, stride, row, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load heads from `row` on as two `[HEADS, PAIRS]` in float32."""
    first, second = read_pairs(x, heads, head_stride, stride, row, R, PAIRS, HEADS, INTERLEAVED)
    return widen_pairs(first, second, PAIRS, HEADS, INTERLEAVED)


@triton.jit
def stochastic_round(x, dtype: tl.constexpr):
    """Round stochastically, to the same bits as `rope_patch.ops.reference`."""
    if dtype == tl.float32:
        return x
    spare: tl.constexpr = 16 if dtype == tl.bfloat16 else 13
    bits = x.to(tl.int32, bitcast=True)
    chance = (bits ^ (bits >> 15)) * -1640531535
    chance = (chance ^ (chance >> 13)) * -2048144777
    up = bits + ((chance >> 7) & ((1 << spare) - 1))
    rounded = (up & -(1 << spare)).to(tl.float32, bitcast=True)
    # The noise would carry a NaN of all ones, which GPUs produce, over to -0.
    return tl.where(x != x, x, rounded)


@triton.jit
def store_pairs(
    x, first, second, heads, head_stride, stride, row, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store what `load_pairs` loads, rounded to the dtype that `x` points at."""
    rows = row + tl.arange(0, HEADS)
    start = x + rows[:, None].to(tl.int64) * head_stride
    valid = (rows < heads)[:, None]
    store_rows(start, valid, first, second, stride, R, PAIRS, HEADS, INTERLEAVED)


@triton.jit
def store_rows(
    start, valid, first, second, stride, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Do `store_pairs` for heads that start at the pointers `start`, `[HEADS, 1]`."""
    dtype = start.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        if R != 2 * PAIRS:
            valid = valid & (column < R)[None, :]
        both = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (HEADS, 2 * PAIRS))
        tl.store(start + column[None, :] * stride, both, mask=valid)
    else:
        pair = tl.arange(0, PAIRS)
        if R != 2 * PAIRS:
            valid = valid & (pair < R // 2)[None, :]
        at = start + pair[None, :] * stride
        tl.store(at, first.to(dtype), mask=valid)
        tl.store(at + (R // 2) * stride, second.to(dtype), mask=valid)


@triton.jit
def unrotated_at(
    x, heads, head_stride, stride, row, D: tl.constexpr, R: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Return pointers to the dimensions that do not rotate, `[HEADS, UNROTATED]`, and a mask."""
    rows = row + tl.arange(0, HEADS)
    column = R + tl.arange(0, UNROTATED)
    at = x + rows[:, None].to(tl.int64) * head_stride + column[None, :] * stride
    return at, (rows < heads)[:, None] & (column < D)[None, :]


@triton.jit
def load_weights(
    weights, heads, head_stride, row, OFFSET: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, UNROTATED: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load a norm's weights as three parts of a tile; `head_stride` is 0 where heads share them."""
    first, second = load_pairs(weights, heads, head_stride, 1, row, R, PAIRS, HEADS, INTERLEAVED)
    third = load_unrotated(weights, heads, head_stride, 1, row, D, R, UNROTATED, HEADS)
    return first + OFFSET, second + OFFSET, third + OFFSET


@triton.jit
def load_unrotated(
    x, heads, head_stride, stride, row, D: tl.constexpr, R: tl.constexpr, UNROTATED: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Load the dimensions that do not rotate in float32; one column of zeros if there are none."""
    if UNROTATED > 0:
        at, valid = unrotated_at(x, heads, head_stride, stride, row, D, R, UNROTATED, HEADS)
        return tl.load(at, mask=valid, other=0.0).to(tl.float32)
    else:
        return tl.zeros((HEADS, 1), dtype=tl.float32)


@triton.jit
def store_unrotated(
    x, unrotated, heads, head_stride, stride, row, D: tl.constexpr, R: tl.constexpr,
    UNROTATED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store what `load_unrotated` loads."""
    if UNROTATED > 0:
        at, valid = unrotated_at(x, heads, head_stride, stride, row, D, R, UNROTATED, HEADS)
        tl.store(at, unrotated.to(x.dtype.element_ty), mask=valid)


@triton.jit
def dot(a1, a2, a3, b1, b2, b3, NORM_ALL_HEADS: tl.constexpr, UNROTATED: tl.constexpr):
    """Return each head's dot product, `[HEADS]`, or the sum over all heads, repeated."""
    total = tl.sum(a1 * b1 + a2 * b2, axis=1)
    if UNROTATED > 0:
        total += tl.sum(a3 * b3, axis=1)
    if NORM_ALL_HEADS:
        total = tl.sum(total, axis=0) + tl.zeros_like(total)
    return total


@triton.jit
def rotate(first, second, cos, sin):
    """Rotate pairs `[HEADS, PAIRS]` by angles `[PAIRS]`."""
    c, s = cos[None, :], sin[None, :]
    return first * c - second * s, second * c + first * s
