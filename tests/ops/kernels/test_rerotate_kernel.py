"""Re-rotation of keys in Triton against plain torch and against rotating raw keys."""

import itertools

import pytest
import torch
from helpers.exact_rotation import DEVICE, Rotation, draw, frequencies, relative_error

pytest.importorskip("triton")

from rope_patch import ops
from rope_patch.ops.reference import rotate

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


def turn_on(keys, positions, old, new, kernels="triton", **settings):
    """Re-rotate keys in place from one set of frequencies and factor to another."""
    positions, *turns = (
        x.to(DEVICE) for x in (positions, *(ops.pack_frequencies(*f) for f in (old, new)))
    )
    layers = keys if isinstance(keys, list) else [keys]
    ops.rerotate_(layers, positions, *turns, kernels=kernels, **settings)
    return keys


def afresh(raw, positions, frequencies_and_factor, interleaved=False):
    """Rotate `[B, K, S, D]` in float64."""
    rotation = Rotation(positions, *frequencies_and_factor, None, interleaved, heads_dim=1)
    return rotation.true_rope(raw)


@layouts
@pytest.mark.parametrize("rows", [None, B], ids=["one for all", "per row"])
@pytest.mark.parametrize("rotary_dim", [64, 48, 20])
def test_turning_on_is_rotating_afresh(rotary_dim, rows, interleaved):
    raw, (old, new) = draw(B, K, S, D), sets(rotary_dim, rows)
    was = afresh(raw, POSITIONS, old, interleaved).float().to(DEVICE)
    keys = turn_on(was.clone(), POSITIONS, old, new, interleaved=interleaved)
    expected = afresh(raw, POSITIONS, new, interleaved)
    assert (keys.cpu() - expected).abs().max() < 2e-6 * expected.abs().max()
    assert keys[..., rotary_dim:].equal(was[..., rotary_dim:])


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["[S]", "[1, S]", "[B, S]"])
def test_it_is_what_plain_torch_does(shape, dtype, interleaved):
    """In 16 bits results agree, except where float32 differs in its last bit and so the noise."""
    raw, (old, new) = draw(B, K, S, D, dtype=dtype), sets(48)
    positions = {"[S]": POSITIONS[0], "[1, S]": POSITIONS[:1], "[B, S]": POSITIONS}[shape]
    got, expected = (
        turn_on(raw.clone(), positions, old, new, kernels, interleaved=interleaved)
        for kernels in ("triton", "reference")
    )
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    else:
        assert (got == expected).float().mean() > 0.93
        torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert not got.equal(raw)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_that_of_plain_torch_to_the_bit(dtype):
    """Change factors alone: without rotation, float32 has the same numbers in both."""
    raw, still = draw(B, K, S, D, dtype=dtype), torch.zeros(D // 2)
    got, expected = (
        turn_on(raw.clone(), POSITIONS, (still, 1.0), (still, 1.01), kernels)
        for kernels in ("triton", "reference")
    )
    assert got.equal(expected)
    assert got.ne(raw).float().mean() > 0.5


def test_rounding_is_fair():
    """Check that a small change is applied with a probability in proportion to its size."""
    keys = torch.zeros(1, 1, 1, 2048, dtype=torch.bfloat16, device=DEVICE)
    keys[..., :1024] = torch.linspace(1, 2, 1024)  # of pairs whose other half is 0
    new = torch.zeros(1024), 1 + 2**-10  # an eighth of the way to the next number, and less
    was = keys.clone()
    turn_on(keys, torch.tensor([0]), (torch.zeros(1024), 1.0), new)
    moved = keys.ne(was)[..., :1024].float().mean().item()
    assert 0.14 < moved < 0.24  # of 1/8 to 1/4
    assert keys[..., 1024:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_same_frequencies_leave_the_bits(dtype):
    keys = draw(B, K, S, D, dtype=dtype)
    was = keys.clone()
    turn_on(keys, POSITIONS, *[(frequencies(D), 1.25)] * 2)
    assert keys.equal(was)


@pytest.mark.parametrize("value", [0.0, float("inf"), -float("inf"), float("nan"), 6e-8, 65504.0])
def test_numbers_at_the_ends_of_float16(value):
    """Check that bitwise rounding keeps zeros, infinities and the largest numbers."""
    keys = torch.full((1, 1, 1, 64), value, dtype=torch.float16, device=DEVICE)
    got, expected = (
        turn_on(keys.clone(), torch.tensor([1]), *sets(), kernels)
        for kernels in ("triton", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-7, equal_nan=True)


def test_several_layers_in_one_call():
    (old, new), layers = sets(48), [draw(B, K, S, D, seed=s) for s in range(3)]
    layers[1] = layers[1].bfloat16()  # and of one cache each
    one_by_one = [turn_on(x.clone(), POSITIONS, old, new) for x in layers]
    for one, other in zip(turn_on(layers, POSITIONS, old, new), one_by_one, strict=True):
        assert one.equal(other)


def test_no_layers_and_no_slots():
    turn_on([], POSITIONS, *sets())
    turn_on([draw(B, K, 0, D)], POSITIONS[:, :0], *sets())
    turn_on([draw(0, K, S, D)], POSITIONS[:0], *sets())


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
def test_memory_of_any_kind_is_written_in_place(name, interleaved):
    keys, (old, new) = KEYS[name](), sets(48)
    around = keys.new_zeros(0).set_(keys.untyped_storage())
    was, mine = around.clone(), torch.zeros_like(around, dtype=torch.bool)
    mine.as_strided(keys.shape, keys.stride(), keys.storage_offset()).fill_(True)
    expected = turn_on(keys.clone(), POSITIONS, old, new, interleaved=interleaved)
    turn_on(keys, POSITIONS, old, new, interleaved=interleaved)
    assert keys.equal(expected)
    assert around[~mine].equal(was[~mine])


def test_slots_further_apart_than_32_bits_count():
    """Check reads and writes in 8 GB of memory of which almost nothing is touched."""
    try:
        memory = torch.empty(2**32 + 2**20, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room")
    near = draw(1, 5, 1, 64, dtype=torch.float16)
    for strides in ((64, 2**29, 64, 1), (64, 64, 2**29, 1)):
        keys = memory.as_strided(near.shape, strides, 2**31)
        if strides[2] > 64:
            keys = memory.as_strided((1, 1, 5, 64), strides, 2**31)
        apart = near.view(keys.shape)
        keys.copy_(apart)
        positions = torch.arange(keys.shape[2])
        expected = turn_on(apart.clone(), positions, *sets())
        assert turn_on(keys, positions, *sets()).equal(expected)


def test_autograd_sees_that_keys_were_changed():
    needed = draw(B, K, S, D, grad=True).exp()
    turn_on(needed.detach(), POSITIONS, *sets())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        needed.sum().backward()


def test_keys_of_inference_mode():
    with torch.inference_mode():
        keys = draw(B, K, S, D)
        expected = turn_on(keys.clone(), POSITIONS, *sets())
    turn_on(keys, POSITIONS, *sets())
    assert keys.equal(expected)


def test_going_and_coming_back():
    keys, (old, new) = draw(B, K, S, D), sets()
    was = keys.clone()
    turn_on(turn_on(keys, POSITIONS, old, new), POSITIONS, new, old)
    torch.testing.assert_close(keys, was, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_turns_drift_no_more_than_those_of_plain_torch(dtype):
    """Check 16 steps, as in a decode from 8k to 128k; the mean of attention scores stays right.

    Each rounds stochastically, with 2^(1/2) times the error of the nearest: 5.7 times in all.
    """
    slots = 8
    raw, positions = draw(1, 8, slots, 128), torch.arange(slots)[None] * 682
    steps = [(frequencies(128, 5e5 * 1.3**n), 1 + n / 50) for n in range(17)]
    start = afresh(raw, positions, steps[0]).to(dtype).to(DEVICE)
    truth = afresh(raw, positions, steps[-1])
    ends = {}
    for kernels in ("triton", "reference"):
        keys = start.clone()
        for old, new in itertools.pairwise(steps):
            turn_on(keys, positions, old, new, kernels)
        ends[kernels] = keys.cpu().double()
    errors = {kernels: relative_error(keys, truth) for kernels, keys in ends.items()}
    assert errors["triton"] == pytest.approx(errors["reference"], rel=0.1)
    assert errors["triton"] < 6.5 * relative_error(truth.to(dtype), truth)
    along = ((ends["triton"] * truth).sum() / truth.square().sum()).item()
    assert along == pytest.approx(1, abs=torch.finfo(dtype).eps / 4)


def test_the_rotation_is_that_of_the_reference():
    """Check the sign and order of the frequencies' difference and the factors' ratio."""
    keys, (old, new) = draw(1, 1, 2, D), sets()
    positions = torch.tensor([0, 7])
    angle = positions[:, None] * (new[0].double() - old[0].double())
    expected = rotate(keys.cpu().double(), angle.cos() * 1.2, angle.sin() * 1.2)
    got = turn_on(keys.clone(), positions, old, new).cpu().double()
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
