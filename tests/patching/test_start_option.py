"""Test `start`: the rotation that a method builds on where the config scales already."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers.releases import plain_transformers
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_config,
    make_model,
    make_native,
)
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch

ORIGINAL = TRAINED // 4  # before the config's scaling: 16 tokens, 64 with it
THETA = 1e4
PAIRS = 8
ORIGIN = {"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL}
SETS = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
CONFIG_SCALINGS = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGIN,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGIN},
    "linear": {"rope_type": "linear", "factor": 4.0, **ORIGIN},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **SETS, **ORIGIN},
}
STATIC = ["linear", "ntk", "ntk-by-parts", "yarn", "llama3", "abf", "ntk-by-parts-2023-06"]


def make_scaled(scaling, **changes):
    return make_model("llama", rope_parameters=copy.deepcopy(CONFIG_SCALINGS[scaling]), **changes)


def running(scaling, seq_len=None):
    """Return transformers' frequencies and attention factor under the config's scaling."""
    config = make_config("llama", rope_parameters=copy.deepcopy(CONFIG_SCALINGS[scaling]))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"), seq_len=seq_len)
    return inv_freq.double(), factor


def unscaled(theta=THETA):
    return theta ** (-torch.arange(PAIRS, dtype=torch.float64) / PAIRS)


def assert_saved(model, folder, native=True, lengths=(ORIGINAL, SHORT, LONG)):
    """Assert that a saved model is the same, and what transformers alone reads, if it can."""
    expected = {length: logits(model, length) for length in lengths}
    rope_patch.save(model, folder)
    assert json.loads((folder / "rope_patch.json").read_text())["native"] is native
    readers = [rope_patch.load, AutoModelForCausalLM.from_pretrained]
    loaded = [read(folder).eval() for read in readers[: 1 + native]]
    for length, patched in expected.items():
        for each in loaded:
            assert_close(logits(each, length), patched)
    handle, saved = rope_patch.current(loaded[0]), rope_patch.current(model)
    assert handle.trained_length == saved.trained_length


@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
def test_trained_scalings_are_extended(scaling):
    start, attention = running(scaling, seq_len=TRAINED)
    handle = rope_patch.patch(make_scaled(scaling), "linear", factor=3.5)
    assert (handle.trained_length, handle.length) == (TRAINED, round(3.5 * TRAINED))
    got = handle.frequencies[None]
    torch.testing.assert_close(got.inv_freq, start / 3.5, rtol=1e-6, atol=0)
    assert got.attention_factor == pytest.approx(attention)
    assert f"the config's own {scaling}" in handle.summary()
    assert "what the model runs with" in handle.summary()


@pytest.mark.parametrize(
    ("scaling", "start"),
    [("yarn", "auto"), ("linear", "auto"), ("llama3", "unscaled"), ("longrope", "unscaled")],
)
def test_untrained_scalings_and_those_left_out_are_replaced(scaling, start):
    """The result equals a patch of the model without the config's scaling."""
    model = make_scaled(scaling)
    handle = rope_patch.patch(model, "yarn", factor=8, start=start)
    assert (handle.trained_length, handle.length) == (ORIGINAL, 8 * ORIGINAL)
    plain = make_model("llama", max_position_embeddings=ORIGINAL)
    rope_patch.patch(plain, "yarn", factor=8)
    assert logits(model).equal(logits(plain))
    assert "in the place of the config's own" in handle.summary()


@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_start_running_extends_an_untrained_scaling(scaling):
    start, attention = running(scaling)
    handle = rope_patch.patch(make_scaled(scaling), "ntk", factor=2, start="running")
    assert handle.trained_length == TRAINED
    expected = start * unscaled(THETA * 2 ** (16 / 14)) / unscaled()
    torch.testing.assert_close(handle.frequencies[None].inv_freq, expected, rtol=1e-6, atol=0)
    assert handle.frequencies[None].attention_factor == pytest.approx(attention)


@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
def test_yarns_ramp_uses_the_running_wavelengths(scaling):
    """Pairs above beta_fast rotations stay; those below one are divided by the factor."""
    start, attention = running(scaling, seq_len=1000)
    handle = rope_patch.patch(make_scaled(scaling), "yarn", factor=4, beta_fast=4, truncate=False)
    got = handle.frequencies[None]
    rotations = TRAINED * start / (2 * torch.pi)
    for pairs, expected in ((rotations > 4, start), (rotations < 1, start / 4)):
        assert pairs.any()
        torch.testing.assert_close(got.inv_freq[pairs], expected[pairs], rtol=1e-6, atol=0)
    mscale = 0.1 * np.log(4.0) + 1
    assert got.attention_factor == pytest.approx(attention * mscale)


def test_short_set_of_longrope_stays():
    """Short texts keep LongRoPE's short set bit for bit; only the long set is stretched."""
    model = make_scaled("longrope")
    short, long = logits(model, ORIGINAL), logits(model, SHORT)
    handle = rope_patch.patch(model, "linear", factor=2)
    assert logits(model, ORIGINAL).equal(short)
    assert_differs(logits(model, SHORT), long)
    parameters = {**CONFIG_SCALINGS["longrope"], "long_factor": [2 * f for f in LONG_FACTOR]}
    parameters["attention_factor"] = running("longrope")[1]
    native = make_native(model, "llama", rope_parameters=parameters)
    for length in (ORIGINAL, SHORT, LONG):
        assert_close(logits(model, length), logits(native, length))
    handle.undo()
    assert logits(model, SHORT).equal(long)


@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
def test_dynamic_methods_keep_the_config_scaling_up_to_its_length(scaling):
    model = make_scaled(scaling)
    before = {n: logits(model, n) for n in (ORIGINAL, SHORT, TRAINED, LONG)}
    rope_patch.patch(model, "dynamic-yarn")
    for length in (ORIGINAL, SHORT, TRAINED):
        assert_close(logits(model, length), before[length])
    assert_differs(logits(model, LONG), before[LONG])


@pytest.mark.parametrize(
    ("scaling", "method"),
    [
        *(("llama3", method) for method in STATIC),
        *((scaling, "yarn") for scaling in CONFIG_SCALINGS if scaling != "llama3"),
        *(
            pytest.param(scaling, method, marks=pytest.mark.slow)
            for scaling in CONFIG_SCALINGS
            for method in STATIC
            if scaling != "llama3" and method != "yarn"
        ),
    ],
)
def test_every_method_is_saved_natively_on_every_scaling(scaling, method, tmp_path):
    model = make_scaled(scaling)
    start = "running" if scaling in ("yarn", "linear") else "auto"
    rope_patch.patch(model, method, factor=4, start=start)
    # LongRoPE's config has one attention factor for both sets; YaRN's would change the short one.
    assert_saved(model, tmp_path, not (scaling == "longrope" and method == "yarn"), (SHORT, LONG))


@pytest.mark.parametrize("method", [*STATIC, "proportional", "nope"])
def test_config_that_accepts_only_longrope_gets_longrope(method, tmp_path):
    """Phi-3's config accepts no rope_type but `longrope`."""
    model = make_model("phi3")
    rope_patch.patch(model, method, **({} if method == "nope" else {"factor": 4}))
    assert_saved(model, tmp_path)


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear"])
@pytest.mark.parametrize("short_factor", [None, SHORT_FACTOR])
def test_two_sets_on_a_running_scaling_are_saved_as_two(tmp_path, scaling, short_factor):
    """Save LongRoPE on the config's own scaling: short texts have a set of their own."""
    model = make_scaled(scaling)
    stretches = {"long_factor": LONG_FACTOR, "short_factor": short_factor}
    rope_patch.patch(model, "longrope", factor=4, start="running", **stretches)
    assert_saved(model, tmp_path, lengths=(SHORT, TRAINED, LONG))


def test_three_sets_have_no_config_form():
    """LongRoPE on a LongRoPE has a set up to the original length, one to the trained, and one."""
    handle = rope_patch.patch(make_scaled("longrope"), "longrope", factor=4, **SETS)
    assert not handle.method.has_config_form


# -- a scaling whose original length is unknown, or that is asked for again ------------------------


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scaling_in_the_config_without_origin_needs_a_trained_length(kind):
    parameters = {"rope_type": kind, "rope_theta": THETA, "factor": 2.0}
    model = make_model("llama", rope_parameters=parameters)
    before = logits(model, TRAINED)
    with pytest.raises(ValueError, match="trained_length="):
        rope_patch.patch(model, "yarn", factor=4)
    handle = rope_patch.patch(model, "yarn", factor=8, trained_length=TRAINED // 2)
    yarn = {"rope_type": "yarn", "rope_theta": THETA, "factor": 8.0}
    yarn["original_max_position_embeddings"] = TRAINED // 2
    assert_close(logits(model), logits(make_native(model, "llama", rope_parameters=yarn)))
    handle.undo()
    assert logits(model, TRAINED).equal(before)


def test_a_dynamic_scaling_is_no_running_start():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}
    model = make_model("llama", rope_parameters=parameters)
    with pytest.raises(ValueError, match="start='unscaled'"):
        rope_patch.patch(model, "yarn", factor=2, start="running")


def test_yarn_in_the_config_is_replaced():
    yarn = {"rope_type": "yarn", "rope_theta": THETA, "original_max_position_embeddings": TRAINED}
    own = {"rope_parameters": {**yarn, "factor": 2.0}, "max_position_embeddings": 2 * TRAINED}
    model = make_model("llama", **own)
    with pytest.raises(ValueError, match="would change nothing"):
        rope_patch.patch(model, "yarn", length=2 * TRAINED)
    before = logits(model)
    handle = rope_patch.patch(model, "yarn", factor=4)
    assert (handle.trained_length, handle.length) == (TRAINED, TARGET)
    other = {"rope_parameters": {**yarn, "factor": 4.0}, "max_position_embeddings": TARGET}
    assert_close(logits(model), logits(make_native(model, "llama", **other)))
    handle.undo()
    assert logits(model).equal(before)


# -- layer types with different scalings -----------------------------------------------------------

FULL, WINDOWS = "full_attention", "sliding_attention"
BOTH = [FULL, WINDOWS]
LLAMA3 = CONFIG_SCALINGS["llama3"]
LONGROPE = {**CONFIG_SCALINGS["longrope"], "attention_factor": 1.25, "rope_theta": 1e3}
OTHER = {
    **LONGROPE,
    "long_factor": [1 + 0.2 * pair for pair in range(PAIRS)],
    "short_factor": [1 + 0.1 * pair for pair in range(PAIRS)],
    "attention_factor": 1.1,
    "rope_theta": THETA,
}


def make_gemma3(full, windows):
    parameters = {FULL: copy.deepcopy(full), WINDOWS: copy.deepcopy(windows)}
    return make_model("gemma3", rope_parameters=parameters)


def expected_inv_freq(parameters, stretch, factor):
    plain = parameters["rope_theta"] ** (-np.arange(PAIRS) / PAIRS)
    if parameters["rope_type"] == "longrope":
        return torch.tensor(plain / parameters[stretch] / factor)
    rotations = ORIGINAL * plain / (2 * np.pi)
    ramp = np.clip((rotations - 1) / 3, 0, 1)
    return torch.tensor((plain * ramp + plain / 4 * (1 - ramp)) / factor)


@pytest.mark.parametrize(
    ("full", "windows"), [(LONGROPE, OTHER), (LLAMA3, OTHER), (LONGROPE, LLAMA3)]
)
def test_each_layer_type_keeps_its_two_sets(full, windows, tmp_path):
    model = make_gemma3(full, windows)
    with plain_transformers():  # up to 5.17, a second forward past the original length fails
        before = {length: logits(model, length) for length in (ORIGINAL, SHORT, LONG)}
    handle = rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    for kind, parameters in ((FULL, full), (WINDOWS, windows)):
        factor = parameters.get("attention_factor", 1)
        for length, stretch in ((1, "short_factor"), (SHORT, "long_factor")):
            got = handle.frequencies_at(length)[kind]
            # llama3 has one set only, which is stretched at every length.
            step = 1 if length == 1 and parameters["rope_type"] == "longrope" else 2
            expected = expected_inv_freq(parameters, stretch, step)
            torch.testing.assert_close(got.inv_freq, expected, rtol=1e-6, atol=0)
            assert got.attention_factor == pytest.approx(factor)
    if LLAMA3 not in (full, windows):
        assert logits(model, ORIGINAL).equal(before[ORIGINAL])
    elif full is LLAMA3:
        assert "linear ×2 on the config's own llama3 and longrope" in handle.summary()
    assert_differs(logits(model, SHORT), before[SHORT])
    assert_saved(model, tmp_path)
    handle.undo()
    assert logits(model).equal(before[LONG])


@pytest.mark.parametrize(("full", "windows"), [(LLAMA3, OTHER), (OTHER, LLAMA3)])
def test_attention_factor_beside_a_short_set_is_not_native(full, windows, tmp_path):
    """LongRoPE's config has one attention factor for both sets."""
    model = make_gemma3(full, windows)
    handle = rope_patch.patch(model, "yarn", factor=2, layer_types=BOTH)
    assert not handle.method.has_config_form
    assert_saved(model, tmp_path, native=False)


def test_short_sets_that_end_at_different_lengths_are_refused():
    model = make_gemma3(LONGROPE, {**OTHER, "original_max_position_embeddings": 2 * ORIGINAL})
    with plain_transformers():
        before = logits(model)
        assert logits(model).equal(before)
    with pytest.raises(ValueError, match="full_attention: 16, sliding_attention: 32"):
        rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    assert logits(model).equal(before)
    rope_patch.patch(model, "linear", factor=2)  # the full layers alone
    assert_differs(logits(model), before)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
def test_layer_types_that_start_at_different_lengths_are_refused():
    model = make_gemma3({**CONFIG_SCALINGS["yarn"], "rope_theta": 1e6}, LLAMA3)
    before = logits(model)
    with pytest.raises(ValueError, match="16 tokens for full"):
        rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    assert logits(model).equal(before)
    rope_patch.patch(model, "linear", factor=8)  # the full layers alone
    assert_differs(logits(model), before)


def test_nope_replaces_the_short_set_too(tmp_path):
    """Apply `nope` to a config with a short and a long set: neither rotates."""
    model = make_model("llama", rope_parameters={**LONGROPE, "attention_factor": 1.0})
    handle = rope_patch.patch(model, "nope")
    assert not handle.frequencies_at(1)[None].inv_freq.any()
    unrotated = {"rope_type": "linear", "factor": 1e18, "rope_theta": THETA}
    native = make_native(model, "llama", rope_parameters=unrotated)
    for length in (ORIGINAL, LONG):
        assert_close(logits(model, length), logits(native, length))
    assert_saved(model, tmp_path, native=not OLD_TRANSFORMERS)
