"""Test extending multi-head latent attention further, from the YaRN in its config."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from architectures.tiny_architectures import TRAINED, tiny_config, tiny_model
from helpers.releases import IGNORES_MSCALE
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rope_patch
from rope_patch.pretrained.sidecar import read_sidecar

ORIGINAL, OWN_FACTOR = TRAINED // 4, 4.0
THETA, PAIRS, LONG = 1e4, 8, 150
UNSCALED = THETA ** (-np.arange(PAIRS) / PAIRS)
MSCALES = {"mscale": 0.707, "mscale_all_dim": 0.9}


def mscale_law(factor, mscale=1.0):
    return 0.1 * mscale * math.log(factor) + 1


@functools.cache
def weights(model_type):
    return tiny_model(model_type).state_dict()


def make(model_type, scaling):
    """Return a model with `rope_parameters` and the same weights for all of them."""
    config = tiny_config(model_type)
    config.rope_parameters = {**config.rope_parameters, **scaling}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(weights(model_type))
    return model


def make_with_yarn(model_type, pair):
    spelled = {
        "rope_type": "yarn",
        "factor": OWN_FACTOR,
        "rope_theta": THETA,
        "original_max_position_embeddings": ORIGINAL,
        **(MSCALES if pair else {}),
    }
    return make(model_type, spelled)


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 100, (1, LONG), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits


def apply_yarn(inv_freq, trained, factor):
    """Apply YaRN's ramp over the completed rotations to any frequencies, in float64."""
    bounds = np.log(2 * np.pi * np.array([32, 1]) / trained)  # 32 rotations, and one
    first, last = np.interp(-bounds, -np.log(inv_freq), np.arange(PAIRS))
    step = math.log(THETA) / PAIRS
    last += max(0.0, (np.log(inv_freq[-1]) - bounds[1]) / step)  # slower than the slowest pair
    low, high = math.floor(first), min(math.ceil(last), 2 * PAIRS - 1)
    ramp = np.clip((np.arange(PAIRS) - low) / (high - low), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


def ntk(inv_freq, factor):
    return inv_freq * (factor ** (2 * PAIRS / (2 * PAIRS - 2))) ** (-np.arange(PAIRS) / PAIRS)


STRETCH = [1 + 0.3 * pair for pair in range(PAIRS)]
# case: (method, options, its frequencies as a function of the earlier ones, its factor on cos and
# sin, its mscale in the softmax scale)
EXTENDED = {
    "linear": ("linear", {"factor": 2}, lambda f: f / 2, 1, 1),
    "ntk": ("ntk", {"factor": 2}, lambda f: ntk(f, 2), 1, 1),
    "longrope, no factor": (
        "longrope",
        {"factor": 1, "long_factor": STRETCH, "short_factor": STRETCH},
        lambda f: f / STRETCH,
        1,
        1,
    ),
    "longrope, sharpened, no factor": (
        "longrope",
        {"factor": 1, "long_factor": STRETCH, "short_factor": STRETCH, "attention_factor": 1.3},
        lambda f: f / STRETCH,
        1,
        1.3,
    ),
    "nope": ("nope", {}, lambda f: 0 * f, 1, 1),
}


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("pair", [False, True], ids=["plain", "pair"])
@pytest.mark.parametrize("case", EXTENDED)
def test_extension_multiplies_the_scales_of_its_start(case, pair, model_type, tmp_path):
    method, options, extend, in_cos_sin, in_softmax = EXTENDED[case]
    inv_freq = extend(apply_yarn(UNSCALED, ORIGINAL, OWN_FACTOR))
    own_cos_sin = (
        mscale_law(OWN_FACTOR, 0.707) / mscale_law(OWN_FACTOR, 0.9)
        if pair
        else mscale_law(OWN_FACTOR)
    )
    own_softmax = mscale_law(OWN_FACTOR, 0.9) if pair and model_type not in IGNORES_MSCALE else 1
    cos_sin, softmax = own_cos_sin * in_cos_sin, own_softmax * in_softmax

    model = make_with_yarn(model_type, pair)
    before = logits(model)
    handle = rope_patch.patch(model, method, start="running", **options)
    got = handle.frequencies[None]
    assert handle.trained_length == TRAINED
    torch.testing.assert_close(got.inv_freq, torch.tensor(inv_freq), rtol=1e-6, atol=0)
    assert got.attention_factor == pytest.approx(cos_sin, rel=1e-6)
    assert handle.softmax_mscale == pytest.approx(softmax, rel=1e-6)
    for layer in model.model.layers:
        unscaled = layer.self_attn.qk_head_dim**-0.5
        assert layer.self_attn.scaling == pytest.approx(unscaled * softmax**2, rel=1e-6)

    # The same numbers in a transformers config; any factor above 1 works with this mscale_all_dim.
    stretches = [1e18 if f == 0 else u / f for u, f in zip(UNSCALED, inv_freq, strict=True)]
    numbers = {
        "rope_type": "longrope",
        "factor": 3.0,
        "long_factor": stretches,
        "short_factor": stretches,
        "attention_factor": cos_sin,
        "mscale_all_dim": (softmax - 1) / (0.1 * math.log(3)),
        "rope_theta": THETA,
        "original_max_position_embeddings": TRAINED,
    }
    patched = logits(model)
    assert (patched - before).abs().max() > 1e-3
    if softmax == 1 or model_type not in IGNORES_MSCALE:
        torch.testing.assert_close(patched, logits(make(model_type, numbers)), rtol=0, atol=1e-4)

    rope_patch.save(model, tmp_path)
    native = read_sidecar(tmp_path)["native"]
    assert native is (softmax == 1 or model_type not in IGNORES_MSCALE)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    if native:
        torch.testing.assert_close(logits(plain), patched, rtol=0, atol=1e-4)
    loaded = rope_patch.load(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(loaded), patched, rtol=0, atol=1e-4)

    handle.undo()
    assert logits(model).equal(before)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {"attention_factor": 1.5}),
        ("longrope", {"long_factor": STRETCH, "short_factor": STRETCH, "attention_factor": 1.3}),
    ],
)
def test_attention_factor_at_factor_1_is_saved_natively(method, options, tmp_path):
    """At factor 1, transformers ignores mscale, so the saved config has another factor."""
    model = tiny_model("deepseek_v3")
    before = logits(model)
    handle = rope_patch.patch(model, method, factor=1, **options)
    assert handle.softmax_mscale == options["attention_factor"]
    assert (logits(model) - before).abs().max() > 1e-3
    rope_patch.save(model, tmp_path)
    assert read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-4)


def test_other_mscale_at_the_same_frequencies_is_a_change():
    """Apply the config's YaRN again, with mscale 1 in the softmax."""
    model = make_with_yarn("deepseek_v3", pair=True)
    before = logits(model)
    same_cos_sin = mscale_law(OWN_FACTOR, 0.707) / mscale_law(OWN_FACTOR, 0.9)
    options = {"attention_factor": same_cos_sin, "mscale": 1.0, "mscale_all_dim": 1e-9}
    handle = rope_patch.patch(model, "yarn", factor=OWN_FACTOR, start="unscaled", **options)
    assert handle.frequencies[None].close_to(handle.original_frequencies[None])
    assert (logits(model) - before).abs().max() > 1e-3


def test_same_yarn_is_refused():
    model = make_with_yarn("deepseek_v3", pair=True)
    with pytest.raises(ValueError, match="would change nothing"):
        rope_patch.patch(model, "yarn", factor=OWN_FACTOR, start="unscaled", **MSCALES)


@pytest.mark.skipif("dots3_note_text" not in CONFIG_MAPPING, reason="newer than this transformers")
def test_unchanged_layers_keep_their_softmax_scale(tmp_path):
    """Dots 3 has latent sliding layers, too, and its config cannot hold their scale."""
    model = tiny_model("dots3_note_text")
    layers = model.model.layers
    attentions = {t: x.self_attn for t, x in zip(model.config.layer_types, layers, strict=True)}
    before = {kind: attention.scaling for kind, attention in attentions.items()}
    rope_patch.patch(model, "yarn", factor=4)
    assert attentions["sliding_attention"].scaling == before["sliding_attention"]
    expected = before["indexed_attention"] * mscale_law(4) ** 2
    assert attentions["indexed_attention"].scaling == pytest.approx(expected)
    rope_patch.save(model, tmp_path)
    assert not read_sidecar(tmp_path)["native"]
    loaded = rope_patch.load(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4)


def test_config_is_restored():
    model = make_with_yarn("deepseek_v3", pair=True)
    parameters = copy.deepcopy(model.config.rope_parameters)
    with rope_patch.patch(model, "yarn", factor=2, start="running"):
        assert model.config.rope_parameters != parameters
    assert model.config.rope_parameters == parameters
