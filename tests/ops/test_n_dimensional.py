"""Test RoPE on several axes against 1-D RoPE, transformers' image encoders and float64."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.exact_rotation import assert_rounded, draw
from transformers.models.llama4 import modeling_llama4
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.pixtral import modeling_pixtral
from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from rope_patch.ops import (
    axial_frequencies,
    mixed_frequencies,
    n_dimensional_rope,
    pack_frequencies,
    reference,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "encodings" / "golden.json").read_text())


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def grid(*sizes):
    """Return the coordinates of all points of a grid, row by row, `[N, A]`."""
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack(axes, -1).flatten(0, -2)


def queries_and_keys(tokens, heads=2, width=16):
    x = torch.randn(2, 1, tokens, heads, width, generator=generator(3), dtype=torch.float64)
    return x[0], x[1]


def products(positions, frequencies, **layout):
    """Return q · k of each two tokens, for vectors that do not depend on the token, `[H, S, S]`."""
    q, k = (x[:, :1].expand(-1, len(positions), -1, -1) for x in queries_and_keys(1))
    q, k = n_dimensional_rope(q, k, positions, frequencies, **layout)
    return torch.einsum("bihd,bjhd->hij", q, k)


KINDS = {
    "axial": axial_frequencies(16, 2, 100.0),
    "alternate": axial_frequencies(16, 2, 100.0, spectrum="alternate"),
    "uneven": axial_frequencies(16, 3, 100.0, pairs=[2, 3, 3]),
    "mixed": mixed_frequencies(16, 2, generator=generator()),
    "mixed heads": mixed_frequencies(16, 2, heads=2, generator=generator()),
    "mixed 4-D": mixed_frequencies(16, 4, heads=2, generator=generator()),
    "partial": axial_frequencies(8, 2),
}
each_kind = pytest.mark.parametrize("frequencies", KINDS.values(), ids=KINDS)


# -- against what exists ---------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_one_axis_is_rope(interleaved, rotary_dim):
    q, k = queries_and_keys(9)
    frequencies = axial_frequencies(rotary_dim, 1, 500.0)
    # Frequencies that float32 holds exactly, as packed ones are rounded to it.
    frequencies = frequencies.float().double()
    positions = torch.arange(9) * 1001
    got = n_dimensional_rope(q, k, positions[:, None], frequencies, interleaved=interleaved)
    packed = pack_frequencies(frequencies[:, 0])
    expected = reference.rope(q, k, positions, packed, interleaved=interleaved)
    for ours, theirs in zip(got, expected, strict=True):
        # The other rotation rounds cos and sin to float32.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_axial_is_rope_with_an_axis_a_pair():
    """M-RoPE's `sections` give each pair an axis, too."""
    q, k = queries_and_keys(12)
    frequencies = KINDS["uneven"].float().double()
    positions, sections = grid(2, 2, 3), frequencies.argmax(1)
    assert sections.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    packed = pack_frequencies(frequencies.sum(1))
    expected = reference.rope(q, k, positions.T[:, None], packed, sections=sections)
    for ours, theirs in zip(
        n_dimensional_rope(q, k, positions, frequencies), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_mixed_with_one_axis_is_rope():
    one = mixed_frequencies(16, 1, 10.0, generator=generator())
    torch.testing.assert_close(one, axial_frequencies(16, 1, 10.0), rtol=0, atol=1e-15)


def test_golden_two_dimensions():
    """The golden vectors have the components of an axis together, each axis in halves."""
    table = torch.sin(
        torch.arange(3)[:, None].double() * 0.37 + torch.arange(8)[None].double() * 1.3
    )
    together = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])  # halves of axis 0 and 1 in halves of all
    x = table[None, :, None, together]
    positions = torch.tensor([[0, 0], [1, 2], [3, 1]])
    got, _ = n_dimensional_rope(x, None, positions, axial_frequencies(8, 2))
    expected = torch.tensor(GOLDEN["rope_2d"], dtype=torch.float64)[:, together]
    torch.testing.assert_close(got[0, :, 0], expected, rtol=0, atol=1e-9)


@pytest.mark.skipif(
    not hasattr(modeling_qwen2_vl, "Qwen2VLVisionRotaryEmbedding"), reason="an older transformers"
)
def test_equals_qwen2_vl():
    config = Qwen2VLVisionConfig(embed_dim=64, num_heads=4)
    rotary = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
    positions = grid(5, 7)
    q, k = draw(35, 4, 16), draw(35, 4, 16, seed=1)
    cos, sin = rotary(q, positions)
    expected = modeling_qwen2_vl.apply_rotary_pos_emb_vision(q, k, cos, sin)
    got = n_dimensional_rope(q[None], k[None], positions, axial_frequencies(16, 2))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=0, atol=3e-6)


@pytest.mark.skipif(
    not hasattr(modeling_pixtral, "PixtralVisionRotaryEmbedding"), reason="an older transformers"
)
def test_equals_pixtral():
    config = PixtralVisionConfig(hidden_size=64, num_attention_heads=4)
    rotary = modeling_pixtral.PixtralVisionRotaryEmbedding(config)
    positions = grid(5, 7)
    q, k = draw(1, 4, 35, 16), draw(1, 4, 35, 16, seed=1)
    expected = modeling_pixtral.apply_rotary_pos_emb(q, k, *rotary(q, positions), unsqueeze_dim=0)
    frequencies = axial_frequencies(16, 2, spectrum="alternate")
    got = n_dimensional_rope(q, k, positions, frequencies, heads_dim=1)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


def test_equals_llama4():
    """Llama 4 counts columns and rows of an image from 1, columns first, in neighbours."""
    config = Llama4VisionConfig(image_size=30, patch_size=5, hidden_size=64, num_attention_heads=4)
    freqs = modeling_llama4.Llama4VisionRotaryEmbedding(config)(torch.zeros(1))
    q, k = draw(1, 36, 4, 16), draw(1, 36, 4, 16, seed=1)
    expected = modeling_llama4.vision_apply_rotary_emb(q, k, freqs[:36])
    positions = grid(6, 6).flip(1) + 1
    got = n_dimensional_rope(q, k, positions, axial_frequencies(16, 2), interleaved=True)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


def test_mixed_begins_as_in_the_paper():
    """The paper's two directions of a head are (cos a, sin a) and a quarter turn on."""
    mixed = mixed_frequencies(16, 2, 10.0, heads=3, generator=generator())
    magnitudes = 10.0 ** -(torch.arange(4).double() / 4)
    assert len(set(mixed[:, 0, 0].tolist())) == 3
    for head in mixed:
        angle = math.atan2(head[0, 1], head[0, 0])
        first = torch.stack([magnitudes * math.cos(angle), magnitudes * math.sin(angle)], 1)
        turned = angle + math.pi / 2
        second = torch.stack([magnitudes * math.cos(turned), magnitudes * math.sin(turned)], 1)
        torch.testing.assert_close(head, torch.cat([first, second]), rtol=0, atol=1e-12)


# -- what holds for all of them --------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("layout", [{}, {"interleaved": True}], ids=["halves", "neighbours"])
def test_products_depend_on_differences_alone(frequencies, layout):
    axes = frequencies.shape[-1]
    positions = torch.randint(0, 20, (7, axes), generator=generator())
    shift = torch.tensor([13, -5, 101, 0.5][:axes])
    here = products(positions, frequencies, **layout)
    torch.testing.assert_close(
        products(positions + shift, frequencies, **layout), here, rtol=0, atol=1e-12
    )
    # Moving one token alone is seen.
    moved = positions.clone()
    moved[0, -1] += 1
    assert (products(moved, frequencies, **layout) - here)[:, 0, 1:].abs().min() > 1e-4


@each_kind
def test_axes_are_told_apart(frequencies):
    """The same step along another axis gives another product."""
    axes = frequencies.shape[-1]
    steps = torch.cat([torch.zeros(1, axes), torch.eye(axes)])
    seen = products(steps, frequencies)[:, 0]  # [H, 1 + A]
    gaps = (seen[:, :, None] - seen[:, None]).abs() + torch.eye(axes + 1)
    assert gaps.min() > 1e-3


@pytest.mark.parametrize(
    ("kind", "separable"), [("axial", True), ("alternate", True), ("mixed", False)]
)
def test_only_mixed_frequencies_see_diagonals(kind, separable):
    """A product of axial pairs is a sum over axes, so a diagonal is a row and a column."""
    steps = products(torch.tensor([[0, 0], [0, 5], [3, 0], [3, 5]]), KINDS[kind])[:, :, 0]
    none, right, down, diagonal = steps.unbind(1)
    left_over = (diagonal - right - down + none).abs()
    assert (left_over.max() < 1e-12) if separable else (left_over.min() > 1e-2)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounds_once(frequencies, dtype):
    x = draw(1, 9, 2, 16, dtype=dtype)
    positions = torch.randint(0, 3000, (9, frequencies.shape[-1]), generator=generator())
    got, _ = n_dimensional_rope(x, None, positions, frequencies)
    heads = frequencies if frequencies.ndim == 3 else frequencies[None]
    angles = torch.einsum("sa,hpa->shp", positions.double(), heads)
    part, rest = x.double().tensor_split([2 * heads.shape[1]], -1)
    turned = torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    truth = torch.cat([turned.real, turned.imag, rest], -1)
    assert got.dtype == dtype
    assert_rounded(got, truth, slack=1e-9 if dtype != torch.float64 else 1e-12)


def test_frequencies_are_learned():
    x = queries_and_keys(3, heads=2, width=8)[0]
    frequencies = mixed_frequencies(8, 2, heads=2, generator=generator()).requires_grad_()
    positions = torch.tensor([[0, 1], [2, 3], [1, 5]])

    def rotated(freqs):
        return n_dimensional_rope(x, None, positions, freqs)[0]

    assert torch.autograd.gradcheck(rotated, frequencies)


def test_rows_and_layouts_agree():
    q, k = (torch.cat([x, x]) for x in queries_and_keys(4))
    rows = torch.stack([grid(2, 2), grid(2, 2) * 7])
    got_q, got_k = n_dimensional_rope(q, k, rows, KINDS["mixed heads"])
    for row in range(2):
        alone, _ = n_dimensional_rope(q[:1], None, rows[row], KINDS["mixed heads"])
        assert torch.equal(got_q[row], alone[0])
    heads_first = n_dimensional_rope(
        q.transpose(1, 2), k.transpose(1, 2), rows, KINDS["mixed heads"], heads_dim=1
    )
    assert torch.equal(heads_first[0].transpose(1, 2), got_q)
    assert torch.equal(heads_first[1].transpose(1, 2), got_k)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: axial_frequencies(16, 3), r"pairs=\[3, 3, 2\]"),
        (lambda: axial_frequencies(16, 2, pairs=[4, 5]), "add up to 8"),
        (lambda: axial_frequencies(16, 2, pairs=[3, 5], spectrum="alternate"), "equal shares"),
        (lambda: axial_frequencies(16, 2, spectrum="other"), "own, alternate"),
        (lambda: axial_frequencies(15, 2), "even number"),
        (lambda: mixed_frequencies(2, 2), "pair for each axis"),
        (lambda: products(grid(2, 2, 2), KINDS["axial"]), r"\[8, 3\] and \[8, 2\]"),
        (lambda: products(grid(2, 2), axial_frequencies(32, 2)), "at least 32 components"),
        (lambda: products(grid(2, 2), KINDS["axial"], heads_dim=3), "heads_dim"),
        (
            lambda: n_dimensional_rope(
                *queries_and_keys(4, heads=3), grid(2, 2), KINDS["mixed heads"]
            ),
            "q must have",
        ),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
