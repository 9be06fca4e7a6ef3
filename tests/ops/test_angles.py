"""Test angles at any position, in plain torch and in Triton, against exact fractions."""

import pytest
import torch
from helpers.exact_rotation import DEVICE, TWO_PI, exact_angles, frequencies

from rope_patch import ops

THETAS = [1e4, 1e7]
NEAR = [0, 1, 8 * 2**10, 128 * 2**10, 2**20, 10_000_000, 2**31 + 5, -1, -2, -8191, -(2**31) - 5]
FAR = [2**40, -(2**40), 2**40 + 12345]


def cos_sin_in_triton(positions, packed_freqs, sections=None):
    """Return cos and sin, by rotating pairs (1, 0)."""
    pytest.importorskip("triton")
    pairs, tokens = packed_freqs.shape[-1] - 1, positions.shape[-1]
    rows = max(
        packed_freqs.numel() // (pairs + 1), positions.shape[-2] if positions.ndim > 1 else 1
    )
    ones = torch.cat([torch.ones(pairs), torch.zeros(pairs)]).expand(rows, tokens, 1, -1)
    arguments = (x if x is None else x.to(DEVICE) for x in (ones, None, positions, packed_freqs))
    sections = sections if sections is None else sections.to(DEVICE)
    rotated, _ = ops.rope(*arguments, sections=sections, kernels="triton")
    cos, sin = rotated[:, :, 0].cpu().chunk(2, dim=-1)
    return cos, sin


torch_and_triton = pytest.mark.parametrize("cos_sin", [ops.cos_sin, cos_sin_in_triton])


def assert_angles(got, positions, inv_freq, tolerance, factor=1.0, sections=None):
    angles = exact_angles(positions, inv_freq, sections)
    for numbers, truth in zip(got, (angles.cos() * factor, angles.sin() * factor), strict=True):
        assert numbers.dtype == torch.float32
        assert (numbers.double() - truth).abs().max() <= tolerance


@torch_and_triton
@pytest.mark.parametrize("theta", THETAS)
def test_angles_are_exact_at_any_position(cos_sin, theta):
    inv_freq = frequencies(128, theta)
    packed_freqs = ops.pack_frequencies(inv_freq)
    for positions, tolerance in ((torch.tensor(NEAR), 2e-7), (torch.tensor(FAR), 4e-7)):
        assert_angles(cos_sin(positions, packed_freqs), positions, inv_freq, tolerance)


@torch_and_triton
def test_angles_in_all_quadrants(cos_sin):
    """Take small steps through several rotations, across every border between quadrants."""
    inv_freq, positions = torch.tensor([0.005, 1 / 3, 3.0, -0.7]), torch.arange(-40, 40) * 63
    positions[:2] = torch.tensor([2**31 - 1, -(2**31)])
    for given in (positions, positions.int()):
        assert_angles(cos_sin(given, ops.pack_frequencies(inv_freq)), positions, inv_freq, 2e-7)


@pytest.mark.parametrize("theta", THETAS)
def test_packed_frequencies_are_integers_of_2_to_the_minus_64_rotations(theta):
    """The last of 64 bits may be rounded the other way."""
    inv_freq = torch.cat([frequencies(256, theta), torch.tensor([0.0, -0.3, 1.0, 3.2, 40.0])])
    *packed_freqs, factor = ops.pack_frequencies(inv_freq).tolist()
    for got, freq in zip(packed_freqs, inv_freq.tolist(), strict=True):
        exact = 2**64 * freq.as_integer_ratio()[0] / TWO_PI / freq.as_integer_ratio()[1]
        assert abs((got - exact + 2**63) % 2**64 - 2**63) <= 1
    assert factor == 0x3F800000


def test_frequencies_are_rounded_to_float32():
    wide = frequencies(64).double() + 1e-12
    assert ops.pack_frequencies(wide).equal(ops.pack_frequencies(wide.float()))


@torch_and_triton
def test_zero_frequency_is_exactly_the_identity(cos_sin):
    cos, sin = cos_sin(torch.tensor([0, 1, 10**7, 2**40, -3]), ops.pack_frequencies(torch.zeros(4)))
    assert cos.eq(1).all()
    assert sin.eq(0).all()


@torch_and_triton
@pytest.mark.parametrize("factor", [1.0, 1.3465735902799727, 0.1, -2.5, 1e-30])
def test_attention_factor_keeps_its_bits(cos_sin, factor):
    packed_freqs = ops.pack_frequencies(torch.zeros(2), factor)
    assert packed_freqs.dtype == torch.int64
    cos, _ = cos_sin(torch.tensor([0, 7]), packed_freqs)
    assert cos.eq(torch.tensor(factor)).all()


@torch_and_triton
@pytest.mark.parametrize("shape", ["[S]", "[1, S]", "[B, S]"])
def test_rows_with_separate_frequencies_and_factors(cos_sin, shape):
    inv_freq = torch.stack([frequencies(32, theta) for theta in (1e4, 2e4, 1e6)])
    factors = torch.tensor([1.0, 1.25, 0.5])
    positions = torch.arange(5) * 1000
    if shape != "[S]":
        positions = positions[None] if shape == "[1, S]" else positions + torch.arange(3)[:, None]
    packed_freqs = ops.pack_frequencies(inv_freq, factors)
    assert packed_freqs.shape == (3, 17)
    got = cos_sin(positions, packed_freqs)
    assert_angles(got, positions, inv_freq, 3e-7, factors.double().view(-1, 1, 1))


@torch_and_triton
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 2])
def test_sections_rotate_by_their_axis(cos_sin, rows, dtype):
    inv_freq = frequencies(32)
    positions = (torch.arange(3 * rows * 4) * 777).view(3, rows, 4)
    for sections in (torch.tensor([0] * 4 + [1] * 6 + [2] * 6), torch.arange(16) % 3):
        sections = sections.to(dtype)
        got = cos_sin(positions, ops.pack_frequencies(inv_freq), sections)
        assert got[0].shape == (rows, 4, 16)
        assert_angles(got, positions, inv_freq, 2e-7, sections=sections)


def test_rerotation_frequencies_lead_from_old_to_new():
    old = ops.pack_frequencies(frequencies(64), 1.25)
    new = ops.pack_frequencies(frequencies(64, 5e5) / 3, 1.5)
    between = ops.rerotation_frequencies(old, new)
    assert (old + between)[:-1].equal(new[:-1])
    cos, sin = ops.cos_sin(torch.tensor([123_456_789]), between)
    first, second = (
        torch.complex(*(c.double() for c in ops.cos_sin(torch.tensor([123_456_789]), packed_freqs)))
        for packed_freqs in (old, new)
    )
    assert (torch.complex(cos, sin) - second / first).abs().max() < 5e-7


def test_rerotation_frequencies_of_equal_sets_are_zero():
    packed_freqs = ops.pack_frequencies(frequencies(64), 1.3)
    *rest, factor = ops.rerotation_frequencies(packed_freqs, packed_freqs).tolist()
    assert not any(rest)
    assert factor == 0x3F800000


@pytest.mark.parametrize("rows", ["old", "new", "both"])
def test_rerotation_frequencies_per_row(rows):
    single, per_row = (
        ops.pack_frequencies(frequencies(8), 2.0),
        torch.arange(1, 4)[:, None] * frequencies(8),
    )
    per_row = ops.pack_frequencies(per_row, torch.tensor([1.0, 2.0, 4.0]))
    old, new = (per_row if rows in (kind, "both") else single for kind in ("old", "new"))
    between = ops.rerotation_frequencies(old, new)
    assert between.shape == (3, 5)
    for row in range(3):
        expected = (t[row] if t.ndim == 2 else t for t in (old, new))
        assert between[row].equal(ops.rerotation_frequencies(*expected))


def test_angles_match_transformers_at_short_distances():
    """Compare sign and unit at positions where float32 products are accurate."""
    inv_freq, positions = frequencies(128), torch.arange(64)
    cos, sin = ops.cos_sin(positions, ops.pack_frequencies(inv_freq))
    angle = positions[:, None].float() * inv_freq
    torch.testing.assert_close(cos[0], angle.cos(), rtol=0, atol=4e-6)
    torch.testing.assert_close(sin[0], angle.sin(), rtol=0, atol=4e-6)
