"""Test the re-rotation of keys in Triton against plain torch and against rotating raw keys."""

import itertools

import pytest
import torch
from helpers.exact_rotation import DEVICE, Rotation, draw, frequencies, relative_error

pytest.importorskip("triton")

import triton
import triton.language as tl

from rope_patch import ops
from rope_patch.ops.kernels.tile import stochastic_round
from rope_patch.ops.reference import _stochastic_round, rotate

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
B, K, S, D = 2, 2, 3, 64
POSITIONS = torch.tensor([[5, 1000, 10_000_000], [0, -3, 2**33]])


def sets(rotary_dim=D, rows=None):
    """Return old and new frequencies, each with its factor."""
    old = frequencies(rotary_dim, 1e4), 1.25
    new = frequencies(rotary_dim, 5e5) / 3, 1.5
    if rows is not None:
        scale = torch.arange(1, rows + 1)
        new = new[0] / scale[:, None], new[1] * scale
    return old, new


def rerotate(keys, positions, old, new, kernels="triton", **settings):
    """Re-rotate keys in place from one set of frequencies and factor to another."""
    positions, *packed_freqs = (
        x.to(DEVICE) for x in (positions, *(ops.pack_frequencies(*f) for f in (old, new)))
    )
    layers = keys if isinstance(keys, list) else [keys]
    ops.rerotate_(layers, positions, *packed_freqs, kernels=kernels, **settings)
    return keys


def rotate_raw(raw, positions, frequencies_and_factor, interleaved=False):
    """Rotate `[B, K, S, D]` in float64."""
    rotation = Rotation(positions, *frequencies_and_factor, None, interleaved, heads_dim=1)
    return rotation.true_rope(raw)


@layouts
@pytest.mark.parametrize("rows", [None, B], ids=["one for all", "per row"])
@pytest.mark.parametrize("rotary_dim", [64, 48, 20])
def test_rerotation_matches_rotating_raw_keys(rotary_dim, rows, interleaved):
    raw, (old, new) = draw(B, K, S, D), sets(rotary_dim, rows)
    before = rotate_raw(raw, POSITIONS, old, interleaved).float().to(DEVICE)
    keys = rerotate(before.clone(), POSITIONS, old, new, interleaved=interleaved)
    expected = rotate_raw(raw, POSITIONS, new, interleaved)
    assert (keys.cpu() - expected).abs().max() < 2e-6 * expected.abs().max()
    assert keys[..., rotary_dim:].equal(before[..., rotary_dim:])


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["[S]", "[1, S]", "[B, S]"])
def test_rerotation_matches_plain_torch(shape, dtype, interleaved):
    """In 16 bits, results may differ where float32's last bit changes the rounding noise."""
    raw, (old, new) = draw(B, K, S, D, dtype=dtype), sets(48)
    positions = {"[S]": POSITIONS[0], "[1, S]": POSITIONS[:1], "[B, S]": POSITIONS}[shape]
    got, expected = (
        rerotate(raw.clone(), positions, old, new, kernels, interleaved=interleaved)
        for kernels in ("triton", "reference")
    )
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    else:
        assert (got == expected).float().mean() > 0.93
        torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert not got.equal(raw)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_matches_plain_torch_bit_for_bit(dtype):
    """Change factors only: without rotation, float32 has the same numbers in both."""
    raw, no_rotation = draw(B, K, S, D, dtype=dtype), torch.zeros(D // 2)
    got, expected = (
        rerotate(raw.clone(), POSITIONS, (no_rotation, 1.0), (no_rotation, 1.01), kernels)
        for kernels in ("triton", "reference")
    )
    assert got.equal(expected)
    assert got.ne(raw).float().mean() > 0.5


def test_rounding_is_stochastic():
    """A small change is applied with a probability in proportion to its size."""
    keys = torch.zeros(1, 1, 1, 2048, dtype=torch.bfloat16, device=DEVICE)
    keys[..., :1024] = torch.linspace(1, 2, 1024)  # the other half of each pair is 0
    new = torch.zeros(1024), 1 + 2**-10  # 1/8 to 1/4 of the way to the next number
    before = keys.clone()
    rerotate(keys, torch.tensor([0]), (torch.zeros(1024), 1.0), new)
    changed_share = keys.ne(before)[..., :1024].float().mean().item()
    assert 0.14 < changed_share < 0.24  # between 1/8 and 1/4
    assert keys[..., 1024:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equal_frequencies_keep_the_bits(dtype):
    keys = draw(B, K, S, D, dtype=dtype)
    before = keys.clone()
    rerotate(keys, POSITIONS, *[(frequencies(D), 1.25)] * 2)
    assert keys.equal(before)


@pytest.mark.parametrize("value", [0.0, float("inf"), -float("inf"), float("nan"), 6e-8, 65504.0])
def test_extreme_float16_numbers(value):
    """Bitwise rounding keeps zeros, infinities and the largest numbers."""
    keys = torch.full((1, 1, 1, 64), value, dtype=torch.float16, device=DEVICE)
    got, expected = (
        rerotate(keys.clone(), torch.tensor([1]), *sets(), kernels)
        for kernels in ("triton", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-7, equal_nan=True)


@triton.jit
def _round_kernel(x, out, DTYPE: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out + at, stochastic_round(tl.load(x + at), DTYPE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_keeps_every_nan(dtype):
    """Check NaNs of all ones, which GPUs produce: the noise would carry them over to -0."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000], dtype=torch.int32, device=DEVICE)
    x = bits.view(torch.float32)
    assert _stochastic_round(x, dtype).isnan().tolist() == [True, True, True, False]
    rounded = torch.empty_like(x)
    _round_kernel[(1,)](x, rounded, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16)
    assert rounded.isnan().tolist() == [True, True, True, False]


def test_several_layers_in_one_call():
    (old, new), layers = sets(48), [draw(B, K, S, D, seed=s) for s in range(3)]
    layers[1] = layers[1].bfloat16()  # dtypes may differ between layers
    one_by_one = [rerotate(x.clone(), POSITIONS, old, new) for x in layers]
    for together, separate in zip(rerotate(layers, POSITIONS, old, new), one_by_one, strict=True):
        assert together.equal(separate)


def test_empty_layers_slots_and_rows():
    rerotate([], POSITIONS, *sets())
    rerotate([draw(B, K, 0, D)], POSITIONS[:, :0], *sets())
    rerotate([draw(0, K, S, D)], POSITIONS[:0], *sets())


KEYS = {
    "a view of BSHD": lambda: draw(B, S, K, D).transpose(1, 2),
    "the first slots of a cache": lambda: draw(B, K, 2 * S, D)[:, :, :S],
    "some rows of a cache": lambda: draw(2 * B, K, S, D)[::2],
    "beside the values": lambda: draw(B, K, S, 2 * D)[..., :D],
    "every other number": lambda: draw(B, K, S, 2 * D)[..., 1::2],
    "not aligned": lambda: draw(B * K * S * D + 1)[1:].view(B, K, S, D),
}


@layouts
@pytest.mark.parametrize("name", KEYS)
def test_memory_layouts_are_written_in_place(name, interleaved):
    keys, (old, new) = KEYS[name](), sets(48)
    storage = keys.new_zeros(0).set_(keys.untyped_storage())
    before, is_key = storage.clone(), torch.zeros_like(storage, dtype=torch.bool)
    is_key.as_strided(keys.shape, keys.stride(), keys.storage_offset()).fill_(True)
    expected = rerotate(keys.clone(), POSITIONS, old, new, interleaved=interleaved)
    rerotate(keys, POSITIONS, old, new, interleaved=interleaved)
    assert keys.equal(expected)
    assert storage[~is_key].equal(before[~is_key])


def test_offsets_beyond_32_bits():
    """Read and write in 8 GB of memory, of which almost nothing is touched."""
    try:
        memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")
    values = draw(1, 5, 1, 64, dtype=torch.float16)
    for strides in ((64, 2**29, 64, 1), (64, 64, 2**29, 1)):
        keys = memory.as_strided(values.shape, strides, 2**31)
        if strides[2] > 64:
            keys = memory.as_strided((1, 1, 5, 64), strides, 2**31)
        reshaped = values.view(keys.shape)
        keys.copy_(reshaped)
        positions = torch.arange(keys.shape[2])
        expected = rerotate(reshaped.clone(), positions, *sets())
        assert rerotate(keys, positions, *sets()).equal(expected)


def test_autograd_detects_changed_keys():
    saved = draw(B, K, S, D, grad=True).exp()
    rerotate(saved.detach(), POSITIONS, *sets())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_keys_of_inference_mode():
    with torch.inference_mode():
        keys = draw(B, K, S, D)
        expected = rerotate(keys.clone(), POSITIONS, *sets())
    rerotate(keys, POSITIONS, *sets())
    assert keys.equal(expected)


def test_rerotation_back_restores_keys():
    keys, (old, new) = draw(B, K, S, D), sets()
    before = keys.clone()
    rerotate(rerotate(keys, POSITIONS, old, new), POSITIONS, new, old)
    torch.testing.assert_close(keys, before, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_rerotations_drift_like_plain_torch(dtype):
    """Re-rotate 16 times, as in decoding from 8k to 128k; the mean of attention scores stays right.

    Stochastic rounding has 2^(1/2) times the error of rounding to nearest: 5.7 times after 16.
    """
    slots = 8
    raw, positions = draw(1, 8, slots, 128), torch.arange(slots)[None] * 682
    steps = [(frequencies(128, 5e5 * 1.3**n), 1 + n / 50) for n in range(17)]
    start = rotate_raw(raw, positions, steps[0]).to(dtype).to(DEVICE)
    truth = rotate_raw(raw, positions, steps[-1])
    results = {}
    for kernels in ("triton", "reference"):
        keys = start.clone()
        for old, new in itertools.pairwise(steps):
            rerotate(keys, positions, old, new, kernels)
        results[kernels] = keys.cpu().double()
    errors = {kernels: relative_error(keys, truth) for kernels, keys in results.items()}
    assert errors["triton"] == pytest.approx(errors["reference"], rel=0.1)
    assert errors["triton"] < 6.5 * relative_error(truth.to(dtype), truth)
    projection = ((results["triton"] * truth).sum() / truth.square().sum()).item()
    assert projection == pytest.approx(1, abs=torch.finfo(dtype).eps / 4)


def test_sign_and_order_match_the_reference():
    """Rotate by the difference of frequencies, and scale by the ratio of factors."""
    keys, (old, new) = draw(1, 1, 2, D), sets()
    positions = torch.tensor([0, 7])
    angle = positions[:, None] * (new[0].double() - old[0].double())
    expected = rotate(keys.cpu().double(), angle.cos() * 1.2, angle.sin() * 1.2)
    got = rerotate(keys.clone(), positions, old, new).cpu().double()
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
