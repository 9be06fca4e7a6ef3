"""Test reference rotation and re-rotation against transformers and float64."""

import importlib
import itertools

import pytest
import torch
from helpers.exact_rotation import DEVICE, Rotation, assert_rounded, draw_heads, make_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rope_patch
from rope_patch.ops import pack_frequencies, rerotation_frequencies
from rope_patch.ops.reference import rerotate_, rerotate_as_transformers_, rms_norm, rotate

# head_dim, rotary_dim, theta, trained length: Llama 3, SmolLM2, Gemma 3 (full), Phi-2
GEOMETRIES = [
    (128, 128, 5e5, 8192),
    (64, 64, 1e5, 8192),
    (256, 256, 1e6, 32768),
    (80, 32, 1e4, 2048),
]


def make_keys(head_dim, slots=7, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, slots, head_dim, generator=generator).to(dtype)


def angles(positions, inv_freq, scale=1.0):
    """Return cos and sin `[B, 1, S, R / 2]`, computed in float64."""
    angle = positions[:, None, :, None].double() * inv_freq.double()
    return angle.cos() * scale, angle.sin() * scale


def frequencies(geometry, method="default", **options):
    head_dim, rotary_dim, theta, trained = geometry
    return rope_patch.frequencies(
        method,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=theta,
        trained_length=trained,
        **options,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rerotation_matches_rotating_raw_keys(geometry, interleaved):
    """Use rows with different frequencies, factors and unordered positions."""
    raw, trained = make_keys(geometry[0]), geometry[3]
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 2000, (2, 7), generator=generator)
    old = [frequencies(geometry, "dynamic-yarn", seq_len=n * trained) for n in (1, 2)]
    new = [frequencies(geometry, "dynamic-yarn", seq_len=n * trained) for n in (3, 1.5)]

    def rotate_raw(sets):
        rows = zip(raw.double(), positions, sets, strict=True)
        rotated_rows = [
            rotate(
                k[None], *angles(p[None], f.inv_freq, f.attention_factor), interleaved=interleaved
            )
            for k, p, f in rows
        ]
        return torch.cat(rotated_rows)

    keys = rotate_raw(old).float()
    before = keys.clone()
    rerotate_as_transformers_(
        [keys],
        positions,
        torch.stack([f.inv_freq for f in old]),
        torch.stack([f.inv_freq for f in new]),
        torch.tensor(
            [n.attention_factor / o.attention_factor for o, n in zip(old, new, strict=True)]
        ),
        interleaved=interleaved,
    )
    # Angles are products in float32, as in transformers: 2000 tokens cost some 1e-4.
    torch.testing.assert_close(keys.double(), rotate_raw(new), rtol=0, atol=2e-3)
    assert keys[..., geometry[1] :].equal(before[..., geometry[1] :])
    assert (keys - before).abs().max() > 0.1


def test_rerotation_cancels_transformers_float32_angles():
    """At 100,000 tokens float32 angles are off by 1e-3, equally for old and new keys."""
    geometry = GEOMETRIES[0]
    raw, positions = make_keys(128, batch=1), torch.arange(100_000, 100_007)[None]

    def rotate_as_transformers(f):
        angle = positions[..., None].float() * f.inv_freq.float()
        wide = torch.cat([angle, angle], -1)
        return apply_rotary_pos_emb(raw, raw, wide.cos(), wide.sin())[1]

    old, new = (frequencies(geometry, "dynamic", seq_len=n * 8192.0) for n in (2, 13))
    keys = rotate_as_transformers(old)
    one = torch.ones(1)
    rerotate_as_transformers_([keys], positions, old.inv_freq[None], new.inv_freq[None], one)
    torch.testing.assert_close(keys, rotate_as_transformers(new), rtol=0, atol=2e-6)


# -- many re-rotations in 16 bits ------------------------------------------------------------------


def rotate_as_transformers_in(dtype, raw, positions, f):
    """Rotate keys as transformers does in a dtype."""
    angle = positions[..., None].float() * f.inv_freq.float()
    wide = torch.cat([angle, angle], -1)
    cos, sin = ((c * f.attention_factor).to(dtype) for c in (wide.cos(), wide.sin()))
    return apply_rotary_pos_emb(raw.to(dtype), raw.to(dtype), cos, sin)[1]


@pytest.mark.parametrize(
    ("method", "geometry"),
    [
        ("dynamic", GEOMETRIES[0]),
        ("dynamic-yarn", GEOMETRIES[1]),
        *(
            pytest.param(method, GEOMETRIES[1], marks=pytest.mark.slow)
            for method in ("dynamic-linear", "dynamic-ntk-by-parts")
        ),
    ],
)
def test_16_rerotations_err_less_than_four_rotations_in_bfloat16(method, geometry):
    """Re-rotate the prompt's keys 16 times, as in decoding from 8k to 128k."""
    trained = geometry[3]
    raw, positions = make_keys(geometry[0], 4096, 1, torch.bfloat16), torch.arange(0, 8192, 2)[None]
    sets = [frequencies(geometry, method, seq_len=trained * 2 ** (k / 4)) for k in range(17)]
    keys = rotate_as_transformers_in(torch.bfloat16, raw, positions, sets[0])
    for old, new in itertools.pairwise(sets):
        scale = torch.tensor([new.attention_factor / old.attention_factor], dtype=torch.float64)
        rerotate_as_transformers_([keys], positions, old.inv_freq[None], new.inv_freq[None], scale)
    truth = rotate_as_transformers_in(torch.float64, raw, positions, sets[-1])
    once = rotate_as_transformers_in(torch.bfloat16, raw, positions, sets[-1])
    assert rms(keys - truth) < 4 * rms(once - truth)
    # Rounding has no bias: the mean of attention scores stays right.
    projection = ((keys * truth).sum() / (truth * truth).sum()).item()
    assert projection == pytest.approx(1, abs=3e-4)


def rms(x):
    return x.double().pow(2).mean().sqrt().item()


# -- exact angles ----------------------------------------------------------------------------------

FAR = torch.tensor([[10_000_000, 2**31 + 5, -3], [0, 1, 131_072]])
ROTATIONS = {
    "far": {"positions": FAR},
    "rows": {"inv_freq": torch.rand(2, 24) / 10, "factor": torch.tensor([1.0, 1.5])},
    "axes": {"positions": torch.arange(18).view(3, 2, 3), "sections": torch.arange(24) % 3},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotation_is_exact_at_any_position(name, heads_dim, interleaved):
    settings = {**ROTATIONS[name], "heads_dim": heads_dim, "interleaved": interleaved}
    rotation = make_rotation(48, 3, **settings)
    inputs = [draw_heads(n, 64, rotation, seed=n) for n in (3, 1)]
    for got, x in zip(rotation.rope(*inputs, kernels="reference"), inputs, strict=True):
        assert_rounded(got, rotation.true_rope(x))
    rotated, none = rotation.rope(inputs[0].half(), kernels="reference")
    assert none is None
    assert_rounded(rotated, rotation.true_rope(inputs[0].half()))


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_and_rotation_round_once(dtype, heads_dim, across):
    rotation = make_rotation(48, heads_dim=heads_dim, factor=1.2)
    q, k = (draw_heads(n, 64, rotation, dtype=dtype, seed=n) for n in (3, 2))
    weights = [torch.rand(n, 64, device=DEVICE) if across else torch.rand(64) for n in (3, 2)]
    weights = [w.to(DEVICE) for w in weights]
    settings = {"eps": 1e-2, "offset": 1.0}
    rotated = rotation.norm_and_rope(q, k, *weights, kernels="reference", **settings)
    for got, x, weight in zip(rotated, (q, k), weights, strict=True):
        assert got.dtype == dtype
        assert_rounded(got, rotation.true_norm_and_rope(x, weight, **settings), slack=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_norms_match_transformers(family):
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    heads, across = make_keys(64), family == "olmo2"
    norm = getattr(modeling, f"{family.title()}RMSNorm")(3 * 64 if across else 64, eps=1e-3)
    weight = torch.nn.init.uniform_(norm.weight.detach(), -1, 1)
    flat = heads.transpose(1, 2).flatten(2)  # as projections leave them
    expected = norm(flat).view(2, 7, 3, 64).transpose(1, 2) if across else norm(heads)
    offset = 1.0 if family == "gemma3" else 0.0
    weight = weight.view(3, 64) if across else weight
    got = rms_norm(heads, weight, eps=1e-3, offset=offset, heads_dim=1)
    torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-5)


# -- re-rotation by exact angles -------------------------------------------------------------------


def pack(f):
    return pack_frequencies(f.inv_freq, f.attention_factor)


def rotate_exactly(raw, positions, f, interleaved=False):
    """Rotate `[B, K, S, D]` in float64."""
    settings = {"interleaved": interleaved, "heads_dim": 1}
    return Rotation(positions, f.inv_freq.float(), f.attention_factor, **settings).true_rope(raw)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rerotation_is_exact_at_any_position(geometry, interleaved):
    raw, trained = make_keys(geometry[0], slots=3), geometry[3]
    old, new = (frequencies(geometry, "dynamic-yarn", seq_len=n * trained) for n in (1, 3))
    keys = rotate_exactly(raw, FAR, old, interleaved).float()
    before = keys.clone()
    between = rerotation_frequencies(pack(old), pack(new))
    rerotate_([keys], FAR, between, interleaved=interleaved)
    expected = rotate_exactly(raw, FAR, new, interleaved)
    assert (keys - expected).abs().max() < 4e-6
    assert keys[..., geometry[1] :].equal(before[..., geometry[1] :])
    assert (keys - before).abs().max() > 0.1


def test_rerotation_of_rows_with_separate_frequencies():
    geometry, raw = GEOMETRIES[1], make_keys(64)
    old, *new = (frequencies(geometry, "dynamic", seq_len=n * 8192.0) for n in (1, 2, 3))
    between = rerotation_frequencies(pack(old), torch.stack([pack(f) for f in new]))
    keys, positions = raw.clone(), torch.arange(7) * 1000
    rerotate_([keys], positions, between)
    for row in range(2):
        single = raw[row : row + 1].clone()
        rerotate_([single], positions, between[row])
        assert keys[row].equal(single[0])
    assert not keys[0].equal(keys[1])


def rerotate(layers, positions, old, new, exact):
    """Re-rotate by exact angles or by those of transformers."""
    if exact:
        rerotate_(layers, positions, rerotation_frequencies(pack(old), pack(new)))
        return
    rows = [f.inv_freq.expand(len(positions), -1) for f in (old, new)]
    rerotate_as_transformers_(layers, positions, *rows, torch.ones(len(positions)))


@pytest.mark.parametrize("exact", [False, True])
def test_rerotation_of_pieces_and_layers_is_equal(exact):
    """Long caches are re-rotated in pieces."""
    keys, positions = make_keys(64, slots=9000, batch=1), torch.arange(9000)[None]
    old, new = (frequencies(GEOMETRIES[1], "dynamic", seq_len=n * 8192.0) for n in (1, 2))
    parts = [k.clone() for k in keys.split(1000, 2)]
    for part, part_positions in zip(parts, positions.split(1000, 1), strict=True):
        rerotate([part], part_positions, old, new, exact)
    layers = [keys.clone(), keys.clone()]
    rerotate(layers, positions, old, new, exact)
    for layer in layers:
        assert layer.equal(torch.cat(parts, 2))


@pytest.mark.parametrize("exact", [False, True])
def test_rerotation_to_equal_frequencies_keeps_the_bits(exact):
    keys, same = make_keys(64, dtype=torch.bfloat16), frequencies(GEOMETRIES[1])
    before = keys.clone()
    rerotate([keys], torch.arange(7).expand(2, -1), same, same, exact)
    assert keys.equal(before)


@pytest.mark.parametrize("method", ["dynamic", "dynamic-yarn"])
def test_16_exact_rerotations_err_less_than_six_rotations(method):
    geometry = GEOMETRIES[0]
    raw, positions = make_keys(128, 256, 1, torch.bfloat16), torch.arange(0, 8192, 32)[None]
    sets = [frequencies(geometry, method, seq_len=8192 * 2 ** (k / 4)) for k in range(17)]
    keys = rotate_exactly(raw, positions, sets[0]).bfloat16()
    for old, new in itertools.pairwise(sets):
        rerotate_([keys], positions, rerotation_frequencies(pack(old), pack(new)))
    truth = rotate_exactly(raw, positions, sets[-1])
    assert rms(keys - truth) < 6 * rms(truth.bfloat16() - truth)
    # Pairs that only change their factor take few different values, so the mean varies more.
    projection = ((keys * truth).sum() / (truth * truth).sum()).item()
    assert projection == pytest.approx(1, abs=1e-3)
