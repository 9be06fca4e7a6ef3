"""What all kernels do with a tile of heads: angles, and pairs in and out of memory.

A tile is `[HEADS, PAIRS]` twice, the first and the second dimension of each rotated pair, in
float32. Dimensions that do not rotate are a third part, `[HEADS, TAIL]`. Counts are padded to
powers of two, and what is beyond the real ones is masked.
"""

import triton
import triton.language as tl


@triton.jit
def cos_sin(phase):
    """cos and sin of an angle in 2^-64 turns, int64, to 1.2e-7.

    The two upper bits say which quarter of a turn is nearest, what is left lies within an eighth
    of a turn of it, and the polynomials are those of Cephes' sinf and cosf.
    """
    quarter = (phase + (1 << 61)) >> 62
    rest = ((phase - (quarter << 62)) >> 32).to(tl.int32).to(tl.float32)
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
def factor_of(turns, R: tl.constexpr):
    """The attention factor, whose float32 bits stand behind the frequencies."""
    return tl.load(turns + R // 2).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def angles(
    positions, turns, sections, axis_stride, SECTIONS: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """cos and sin of one token, `[PAIRS]`, without the attention factor.

    Both pointers stand at the token's row; `positions` at its first axis.
    """
    pair = tl.arange(0, PAIRS)
    real = pair < R // 2
    turn = tl.load(turns + pair, mask=real, other=0)
    if SECTIONS:
        axis = tl.load(sections + pair, mask=real, other=0).to(tl.int64)
        at = tl.load(positions + axis * axis_stride, mask=real, other=0).to(tl.int64)
    else:
        at = tl.load(positions).to(tl.int64)
    return cos_sin(at * turn)


@triton.jit
def load_pairs(
    x, heads, head_stride, stride, row, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Two `[HEADS, PAIRS]` in float32, from heads `row` on; `stride` is that of the dimensions."""
    rows = row + tl.arange(0, HEADS)
    start = x + rows[:, None].to(tl.int64) * head_stride
    real = (rows < heads)[:, None]
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        if R != 2 * PAIRS:
            real = real & (column < R)[None, :]
        both = tl.load(start + column[None, :] * stride, mask=real, other=0.0)
        first, second = tl.split(tl.reshape(both.to(tl.float32), (HEADS, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)
        if R != 2 * PAIRS:
            real = real & (pair < R // 2)[None, :]
        at = start + pair[None, :] * stride
        first = tl.load(at, mask=real, other=0.0).to(tl.float32)
        second = tl.load(at + (R // 2) * stride, mask=real, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def round_fairly(x, kind: tl.constexpr):
    """Stochastic rounding, as `rope_patch.ops.reference` does it and to the same bits."""
    if kind == tl.float32:
        return x
    spare: tl.constexpr = 16 if kind == tl.bfloat16 else 13
    bits = x.to(tl.int32, bitcast=True)
    chance = (bits ^ (bits >> 15)) * -1640531535
    chance = (chance ^ (chance >> 13)) * -2048144777
    up = bits + ((chance >> 7) & ((1 << spare) - 1))
    return (up & -(1 << spare)).to(tl.float32, bitcast=True)


@triton.jit
def store_pairs(
    x, first, second, heads, head_stride, stride, row, R: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The reverse of `load_pairs`; rounds to what `x` points at."""
    rows = row + tl.arange(0, HEADS)
    start = x + rows[:, None].to(tl.int64) * head_stride
    real = (rows < heads)[:, None]
    kind = x.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        if R != 2 * PAIRS:
            real = real & (column < R)[None, :]
        both = tl.reshape(tl.join(first.to(kind), second.to(kind)), (HEADS, 2 * PAIRS))
        tl.store(start + column[None, :] * stride, both, mask=real)
    else:
        pair = tl.arange(0, PAIRS)
        if R != 2 * PAIRS:
            real = real & (pair < R // 2)[None, :]
        at = start + pair[None, :] * stride
        tl.store(at, first.to(kind), mask=real)
        tl.store(at + (R // 2) * stride, second.to(kind), mask=real)


@triton.jit
def tail_at(
    x, heads, head_stride, stride, row, D: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Pointers to the dimensions that do not rotate, `[HEADS, TAIL]`, and which of them are."""
    rows = row + tl.arange(0, HEADS)
    column = R + tl.arange(0, TAIL)
    at = x + rows[:, None].to(tl.int64) * head_stride + column[None, :] * stride
    return at, (rows < heads)[:, None] & (column < D)[None, :]


@triton.jit
def load_weights(
    weights, heads, head_stride, row, OFFSET: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A norm's weights as three parts of a tile; `head_stride` is 0 where heads share them."""
    first, second = load_pairs(weights, heads, head_stride, 1, row, R, PAIRS, HEADS, INTERLEAVED)
    third = load_tail(weights, heads, head_stride, 1, row, D, R, TAIL, HEADS)
    return first + OFFSET, second + OFFSET, third + OFFSET


@triton.jit
def load_tail(
    x, heads, head_stride, stride, row, D: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The dimensions that do not rotate, in float32; one of zeros where all do."""
    if TAIL > 0:
        at, real = tail_at(x, heads, head_stride, stride, row, D, R, TAIL, HEADS)
        return tl.load(at, mask=real, other=0.0).to(tl.float32)
    else:
        return tl.zeros((HEADS, 1), dtype=tl.float32)


@triton.jit
def store_tail(
    x, tail, heads, head_stride, stride, row, D: tl.constexpr, R: tl.constexpr,
    TAIL: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The reverse of `load_tail`."""
    if TAIL > 0:
        at, real = tail_at(x, heads, head_stride, stride, row, D, R, TAIL, HEADS)
        tl.store(at, tail.to(x.dtype.element_ty), mask=real)


@triton.jit
def dot(a1, a2, a3, b1, b2, b3, ACROSS: tl.constexpr, TAIL: tl.constexpr):
    """Sum of products for each head, `[HEADS]`, or of all heads together, repeated."""
    total = tl.sum(a1 * b1 + a2 * b2, axis=1)
    if TAIL > 0:
        total += tl.sum(a3 * b3, axis=1)
    if ACROSS:
        total = tl.sum(total, axis=0) + tl.zeros_like(total)
    return total


@triton.jit
def turn(first, second, cos, sin):
    """Rotates pairs `[HEADS, PAIRS]` by angles `[PAIRS]`."""
    c, s = cos[None, :], sin[None, :]
    return first * c - second * s, second * c + first * s
