"""Test rotation in Triton against complex float64: sizes, positions, frequencies, memory."""

import pytest
import torch
from helpers.exact_rotation import (
    DEVICE,
    assert_rounded,
    draw,
    frequencies,
    make_rotation,
)
from rope_checks import check, draw_pair, rotate_back

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.kernels import launcher

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
heads_dims = pytest.mark.parametrize("heads_dim", [1, 2])


# -- sizes -----------------------------------------------------------------------------------------

SIZES = [
    *((dim, dim) for dim in (64, 80, 96, 112, 128, 256, 512)),
    *((128, 20), (128, 32), (128, 96), (80, 20), (80, 32), (96, 72), (112, 56), (64, 48)),
    *((256, 64), (256, 192), (512, 128), (72, 36), (2, 2), (3, 2), (65, 64)),
]


@layouts
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_head_and_rotary_sizes(head_dim, rotary_dim, interleaved):
    rotation = make_rotation(rotary_dim, tokens=2, interleaved=interleaved)
    q, k = draw_pair(rotation, head_dim=head_dim, batch=1)
    outputs = check(q, k, rotation)
    for got, x in zip(outputs, (q, k), strict=True):
        assert got[..., rotary_dim:].equal(x[..., rotary_dim:])


@layouts
@heads_dims
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 20)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_results_are_rounded_once(dtype, head_dim, rotary_dim, heads_dim, interleaved):
    rotation = make_rotation(rotary_dim, 2, heads_dim=heads_dim, interleaved=interleaved)
    check(*draw_pair(rotation, head_dim=head_dim, dtype=dtype, batch=1), rotation)


@pytest.mark.parametrize(
    ("limit", "one_head_limit"),
    [(0, 0), (10**9, 0), (10**9, 1)],
    ids=["one program a token", "programs share", "one program a head"],
)
@pytest.mark.parametrize(
    ("heads", "key_heads"), [(1, 1), (5, 1), (9, 3), (40, 8), (48, 4), (56, 8), (2, 17)]
)
def test_numbers_of_heads(monkeypatch, heads, key_heads, limit, one_head_limit):
    """Use one program for all heads of a token, as with many tokens, and several programs."""
    monkeypatch.setattr(launcher, "_ONE_PROGRAM_TOKENS", limit)
    monkeypatch.setattr(launcher, "_ONE_HEAD_TOKENS", one_head_limit)
    rotation = make_rotation(128, tokens=1)
    check(*draw_pair(rotation, heads, key_heads, 128, batch=1), rotation)


@heads_dims
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 7), (2, 0), (0, 3), (0, 0)])
def test_numbers_of_tokens_and_rows(batch, tokens, heads_dim):
    rotation = make_rotation(32, tokens, heads_dim=heads_dim)
    check(*draw_pair(rotation, batch=batch), rotation)


def test_no_pairs_change_nothing():
    rotation = make_rotation(0)
    inputs = draw_pair(rotation, grad=False)
    for got, x in zip(rotation.rope(*inputs), inputs, strict=True):
        assert got.equal(x)


# -- positions -------------------------------------------------------------------------------------

POSITIONS = {
    "left-padded": [[0, 0, 0, 1, 2], [1, 1, 0, 1, 2]],
    "packed": [[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]],
    "negative": [[-3, -2, -1, 0, 1], [-(10**9), -77, 3, -1, 0]],
    "millions": [[10_000_000, 10_000_001, 999_999, 131_072, 0], [2**31 - 1, 5, 4, 3, 2]],
    "billions": [[2**31, 2**31 + 5, 2**32 + 1, 2**33, -(2**31) - 9], [1, 2**32, 3, 4, 2**35]],
}
DTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POSITIONS)
def test_kinds_of_positions(name, dtype):
    positions = torch.tensor(POSITIONS[name], dtype=torch.int64)
    if name != "billions":  # these need int64
        positions = positions.to(dtype)
    heads_dim = 1 if dtype == torch.int32 else 2
    rotation = make_rotation(64, positions=positions, heads_dim=heads_dim)
    check(*draw_pair(rotation, 2, 1), rotation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", ["[S]", "[1, S]", "[B, S]", "expanded", "every other", "transposed"]
)
def test_shapes_of_positions(shape, dtype):
    numbers = torch.arange(20, dtype=dtype, device=DEVICE)
    positions = {
        "[S]": numbers[:3],
        "[1, S]": numbers[None, :3],
        "[B, S]": numbers.view(2, 10)[:, :3],
        "expanded": numbers[:3].expand(2, -1),
        "every other": numbers.view(2, 10)[:, 1:7:2],
        "transposed": numbers[:6].view(3, 2).t(),
    }[shape]
    rotation = make_rotation(64, positions=positions)
    check(*draw_pair(rotation), rotation)


SECTIONS = {
    "blocks": torch.tensor([0] * 8 + [1] * 12 + [2] * 12),
    "in turn": torch.arange(32) % 3,
    "two axes": torch.arange(32) % 2,
}


@layouts
@heads_dims
@pytest.mark.parametrize("name", SECTIONS)
def test_sections_rotate_by_their_axis(name, heads_dim, interleaved):
    rows = 1 if heads_dim == 1 else 2
    rotation = make_rotation(
        64,
        positions=torch.arange(3 * rows * 4).view(3, rows, 4) * 99,
        sections=SECTIONS[name].to(torch.int8 if interleaved else torch.int64),
        heads_dim=heads_dim,
        interleaved=interleaved,
    )
    check(*draw_pair(rotation), rotation)


@pytest.mark.parametrize("dims", [(2, 1, 0), (0, 2, 1), (1, 2, 0)])
def test_strided_positions_with_axes(dims):
    shape = [(3, 2, 4)[i] for i in dims]
    positions = torch.arange(24, device=DEVICE).view(shape)
    positions = positions.permute([dims.index(i) for i in range(3)])
    assert positions.shape == (3, 2, 4)
    rotation = make_rotation(64, positions=positions, sections=SECTIONS["in turn"])
    check(*draw_pair(rotation), rotation)


# -- frequencies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.3465736, 0.5, -1.0])
def test_attention_factor_scales_rotated_dimensions(factor):
    rotation = make_rotation(32, factor=factor)
    check(*draw_pair(rotation), rotation)


@heads_dims
def test_rows_with_separate_frequencies_and_factors(heads_dim):
    inv_freq = torch.stack([frequencies(64, 1e4), frequencies(64, 5e5)])
    rotation = make_rotation(
        64, inv_freq=inv_freq, factor=torch.tensor([1.0, 1.5]), heads_dim=heads_dim
    )
    check(*draw_pair(rotation), rotation)


@pytest.mark.parametrize("shape", ["one row", "expanded", "of a larger tensor"])
def test_memory_layouts_of_frequencies(shape):
    packed_freqs = ops.pack_frequencies(frequencies(64)).to(DEVICE)
    packed_freqs = {
        "one row": packed_freqs[None],
        "expanded": packed_freqs.expand(2, -1),
        "of a larger tensor": torch.stack([packed_freqs, -packed_freqs]).repeat(2, 1)[::2],
    }[shape]
    rotation = make_rotation(64)
    for x in draw_pair(rotation, grad=False):
        outputs, _ = ops.rope(
            x, None, rotation.positions.to(DEVICE), packed_freqs, kernels="triton"
        )
        assert_rounded(outputs, rotation.true_rope(x))


@layouts
def test_zero_frequencies_keep_the_bits(interleaved):
    """As in Gemma 4, all dimensions are in pairs, but most do not rotate."""
    inv_freq = torch.cat([frequencies(16), torch.zeros(24)])
    rotation = make_rotation(0, inv_freq=inv_freq, interleaved=interleaved)
    q, k = draw_pair(rotation, head_dim=64, dtype=torch.float16)
    unrotated = list(range(16, 64)) if interleaved else [*range(8, 32), *range(40, 64)]
    for got, x in zip(check(q, k, rotation), (q, k), strict=True):
        assert got[..., unrotated].equal(x[..., unrotated])
        assert not got.equal(x)


# -- memory ----------------------------------------------------------------------------------------

B, S, H, D = 2, 2, 3, 64


def strided(name, dtype=torch.float32, seed=0):
    """Return `[B, H, S, D]` with a named memory layout."""
    if name == "a view of BSHD":
        return draw(B, S, H, D, dtype=dtype, seed=seed).transpose(1, 2)
    if name == "contiguous":
        return draw(B, H, S, D, dtype=dtype, seed=seed)
    if name == "of packed q, k and v":
        packed = draw(B, S, 3 * H * D, dtype=dtype, seed=seed)
        return packed[..., H * D : 2 * H * D].view(B, S, H, D).transpose(1, 2)
    if name == "beside a gate":
        return draw(B, S, H, 2 * D, dtype=dtype, seed=seed)[..., :D].transpose(1, 2)
    if name == "every other number":
        return draw(B, H, S, 2 * D, dtype=dtype, seed=seed)[..., ::2]
    if name == "dimensions first":
        return draw(B, D, S, H, dtype=dtype, seed=seed).permute(0, 3, 2, 1)
    if name == "not aligned":
        return draw(B * H * S * D + 1, dtype=dtype, seed=seed)[1:].view(B, H, S, D)
    if name == "not aligned rows":
        return draw(B, H, S, D + 1, dtype=dtype, seed=seed)[..., :D]
    if name == "repeated heads":
        return draw(B, 1, S, D, dtype=dtype, seed=seed).expand(-1, H, -1, -1)
    assert name == "tokens first"
    return draw(S, B, H, D, dtype=dtype, seed=seed).permute(1, 2, 0, 3)


STRIDED = [
    *("a view of BSHD", "contiguous", "of packed q, k and v", "beside a gate", "tokens first"),
    *("every other number", "dimensions first", "not aligned", "not aligned rows"),
    "repeated heads",
]


@layouts
@heads_dims
@pytest.mark.parametrize("name", STRIDED)
def test_memory_layouts(name, heads_dim, interleaved):
    rotation = make_rotation(48, S, heads_dim=heads_dim, interleaved=interleaved)
    q, k = strided(name, seed=1), strided("contiguous", seed=2)
    q, k = (x if heads_dim == 1 else x.transpose(1, 2) for x in (q, k))
    q, k = (k, q) if interleaved else (q, k)
    # Each gradient has the memory layout of the other input.
    check(q.detach().requires_grad_(), k.detach().requires_grad_(), rotation, grads=(k, q))


def test_expanded_gradients_of_a_sum():
    rotation = make_rotation(64)
    q, k = draw_pair(rotation)
    rotated_q, rotated_k = rotation.rope(q, k)
    (rotated_q.sum() + rotated_k.sum(dim=(1, 3)).square().sum()).backward()
    ones = torch.ones(()).expand(q.shape)
    assert_rounded(q.grad, rotate_back(rotation, q, ones))
    k_grad = 2 * rotation.true_rope(k.detach()).sum(dim=(1, 3), keepdim=True)
    assert_rounded(k.grad, rotate_back(rotation, k, k_grad.expand(k.shape)))


@pytest.mark.parametrize("name", ["heads", "tokens", "rows"])
def test_offsets_beyond_32_bits(name):
    """Use strides in 8 GB of memory, of which almost nothing is touched."""
    try:
        memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")
    # Start in the middle, so that an offset that wraps around stays inside the memory.
    dim = ["rows", "tokens", "heads"].index(name)
    sizes, strides = [1, 1, 1, 64], [64, 64, 64, 1]
    sizes[dim], strides[dim] = 5, 2**29
    x = memory.as_strided(sizes, strides, 2**31)
    x.copy_(draw(*x.shape, dtype=torch.float16))
    check(x, None, make_rotation(48, x.shape[1]))
