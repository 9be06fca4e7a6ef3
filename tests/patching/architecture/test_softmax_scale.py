"""Test multi-head latent attention, which gets the attention factor once, in its softmax scale."""

import copy
import functools
import json
import math

import numpy as np
import pytest
import torch
from architectures.tiny_architectures import TRAINED, tiny_config, tiny_model
from helpers.releases import IGNORES_MSCALE, require_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rope_patch

ORIGINAL, OWN_FACTOR = TRAINED // 4, 4.0
THETA, PAIRS, LONG = 1e4, 8, 150
UNSCALED = THETA ** (-np.arange(PAIRS) / PAIRS)
STRETCH = [1 + 0.3 * pair for pair in range(PAIRS)]
STRETCHES = {"long_factor": STRETCH, "short_factor": STRETCH}
MSCALES = {"mscale": 0.707, "mscale_all_dim": 0.9}


def mscale_law(factor, mscale=1.0):
    return 0.1 * mscale * math.log(factor) + 1


@functools.cache
def weights(model_type):
    return tiny_model(model_type).state_dict()


def make(model_type, **parameters):
    """Return a model with changed `rope_parameters`, of the same weights for all of them."""
    config = tiny_config(model_type)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": THETA, **parameters}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(weights(model_type))
    return model


def make_with_yarn(model_type, **mscales):
    """Return a model whose config extends 16 tokens to 64."""
    origin = {"original_max_position_embeddings": ORIGINAL}
    return make(model_type, rope_type="yarn", factor=OWN_FACTOR, **origin, **mscales)


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 100, (1, LONG), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def assert_saved(model, folder, native):
    """Assert that a saved model is the same, and what transformers alone reads, if it can."""
    patched = logits(model)
    rope_patch.save(model, folder)
    assert json.loads((folder / "rope_patch.json").read_text())["native"] is native
    if native:
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        close(logits(plain), patched)
    close(logits(rope_patch.load(folder, attn_implementation="eager").eval()), patched)


# -- without a scaling in the config ---------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
def test_yarn_matches_deepseeks_config(model_type):
    require_model(model_type)
    if model_type in IGNORES_MSCALE:
        pytest.skip("this release's own config has no mscale in the softmax")
    model = tiny_model(model_type)
    assert model.config.rope_parameters["rope_type"] == "default"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    expected = logits(make(model_type, **yarn, mscale=1.0, mscale_all_dim=1.0))
    scaled_twice = logits(make(model_type, **yarn, attention_factor=mscale_law(4)))
    handle = rope_patch.patch(model, "yarn", factor=4)
    assert handle.frequencies[None].attention_factor == 1
    assert handle.softmax_mscale == pytest.approx(mscale_law(4))
    close(logits(model), expected)
    assert (logits(model) - scaled_twice).abs().max() > 1e-3
    assert "softmax scale" in handle.summary()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {}),
        ("yarn", MSCALES),
        ("yarn", {"attention_factor": 1.5}),
        ("ntk-by-parts", {}),
        ("linear", {}),
        ("ntk", {}),
        ("longrope", STRETCHES),
    ],
)
def test_patched_config_builds_the_same_model(method, options):
    model = tiny_model("deepseek_v3")
    with rope_patch.patch(model, method, factor=4, **options):
        patched, parameters = logits(model), copy.deepcopy(model.config.rope_parameters)
    origin = {"original_max_position_embeddings": TRAINED}
    close(logits(make("deepseek_v3", **{**origin, **parameters})), patched)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {"attention_factor": 1.5}),
        ("longrope", {**STRETCHES, "attention_factor": 1.3}),
    ],
)
def test_attention_factor_at_factor_1_is_saved_natively(method, options, tmp_path):
    """At factor 1, transformers ignores mscale, so the saved config has another factor."""
    model = tiny_model("deepseek_v3")
    before = logits(model)
    handle = rope_patch.patch(model, method, factor=1, **options)
    assert handle.softmax_mscale == options["attention_factor"]
    assert (logits(model) - before).abs().max() > 1e-3
    assert_saved(model, tmp_path, native=True)


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
    assert_saved(model, tmp_path, native=False)


# -- from the YaRN in the config -------------------------------------------------------------------


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


# Method, options, its frequencies as a function of the earlier ones, its mscale in the softmax.
EXTENDED = {
    "linear": ("linear", {"factor": 2}, lambda f: f / 2, 1),
    "ntk": ("ntk", {"factor": 2}, lambda f: ntk(f, 2), 1),
    "longrope, no factor": ("longrope", {"factor": 1, **STRETCHES}, lambda f: f / STRETCH, 1),
    "longrope, sharpened, no factor": (
        "longrope",
        {"factor": 1, **STRETCHES, "attention_factor": 1.3},
        lambda f: f / STRETCH,
        1.3,
    ),
    "nope": ("nope", {}, lambda f: 0 * f, 1),
}


@pytest.mark.parametrize(
    ("case", "mscales", "model_type"),
    [
        *((case, mscales, "deepseek_v3") for case in EXTENDED for mscales in ({}, MSCALES)),
        ("linear", MSCALES, "deepseek_v2"),
        *(
            pytest.param(case, mscales, "deepseek_v2", marks=pytest.mark.slow)
            for case in EXTENDED
            for mscales in ({}, MSCALES)
            if (case, mscales) != ("linear", MSCALES)
        ),
    ],
)
def test_extension_multiplies_the_scales_of_its_start(case, mscales, model_type, tmp_path):
    method, options, extend, in_softmax = EXTENDED[case]
    inv_freq = extend(apply_yarn(UNSCALED, ORIGINAL, OWN_FACTOR))
    cos_sin, softmax = mscale_law(OWN_FACTOR), in_softmax
    if mscales:
        cos_sin = mscale_law(OWN_FACTOR, 0.707) / mscale_law(OWN_FACTOR, 0.9)
        if model_type not in IGNORES_MSCALE:
            softmax *= mscale_law(OWN_FACTOR, 0.9)

    model = make_with_yarn(model_type, **mscales)
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
        "original_max_position_embeddings": TRAINED,
    }
    patched = logits(model)
    assert (patched - before).abs().max() > 1e-3
    native = softmax == 1 or model_type not in IGNORES_MSCALE
    if native:
        close(patched, logits(make(model_type, **numbers)))
    assert_saved(model, tmp_path, native)

    handle.undo()
    assert logits(model).equal(before)


def test_scale_from_the_config_is_replaced_and_restored():
    model = make_with_yarn("deepseek_v3", mscale=1.0, mscale_all_dim=1.0)
    parameters = copy.deepcopy(model.config.rope_parameters)
    attention = model.model.layers[0].self_attn
    unscaled = attention.qk_head_dim**-0.5
    own = pytest.approx(unscaled * mscale_law(4) ** 2)
    twice = pytest.approx(unscaled * mscale_law(8) ** 2)
    assert attention.scaling == own
    with rope_patch.patch(model, "yarn", factor=8, start="unscaled"):  # from 16 tokens to 128
        assert attention.scaling == twice
    with rope_patch.patch(model, "linear", factor=8, start="unscaled"):  # no attention factor
        assert attention.scaling == pytest.approx(unscaled)
    with rope_patch.patch(model, "yarn", factor=2):  # one YaRN from 16 tokens, 64 with the config's
        assert attention.scaling == twice
        assert model.config.rope_parameters != parameters
    assert attention.scaling == own
    assert model.config.rope_parameters == parameters


def test_same_yarn_is_refused_and_another_mscale_is_a_change():
    """Apply the config's YaRN again, as it is, and with mscale 1 in the softmax."""
    model = make_with_yarn("deepseek_v3", **MSCALES)
    before, options = logits(model), {"factor": OWN_FACTOR, "start": "unscaled"}
    with pytest.raises(ValueError, match="would change nothing"):
        rope_patch.patch(model, "yarn", **options, **MSCALES)
    same_cos_sin = mscale_law(OWN_FACTOR, 0.707) / mscale_law(OWN_FACTOR, 0.9)
    options |= {"attention_factor": same_cos_sin, "mscale": 1.0, "mscale_all_dim": 1e-9}
    handle = rope_patch.patch(model, "yarn", **options)
    assert handle.frequencies[None].close_to(handle.original_frequencies[None])
    assert (logits(model) - before).abs().max() > 1e-3
