"""Test `start`: the rotation that a method builds on where the config scales already."""

import copy

import pytest
import torch
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
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
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "long_factor": LONG_FACTOR,
        "short_factor": SHORT_FACTOR,
        **ORIGIN,
    },
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


@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
@pytest.mark.parametrize("factor", [2, 3.5])
def test_trained_scalings_are_extended(scaling, factor):
    start, attention = running(scaling, seq_len=TRAINED)
    handle = rope_patch.patch(make_scaled(scaling), "linear", factor=factor)
    assert (handle.trained_length, handle.length) == (TRAINED, round(factor * TRAINED))
    got = handle.frequencies[None]
    torch.testing.assert_close(got.inv_freq, start / factor, rtol=1e-6, atol=0)
    assert got.attention_factor == pytest.approx(attention)
    assert f"the config's own {scaling}" in handle.summary()
    assert "what the model runs with" in handle.summary()


@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_untrained_scalings_are_replaced(scaling):
    """The result equals a patch of the model without the config's scaling."""
    model = make_scaled(scaling)
    handle = rope_patch.patch(model, "yarn", factor=8)
    assert (handle.trained_length, handle.length) == (ORIGINAL, 8 * ORIGINAL)
    plain = make_model("llama", max_position_embeddings=ORIGINAL)
    rope_patch.patch(plain, "yarn", factor=8)
    assert logits(model).equal(logits(plain))
    assert "in the place of the config's own" in handle.summary()


@pytest.mark.parametrize("scaling", ["llama3", "longrope"])
def test_start_unscaled_replaces_a_trained_scaling(scaling):
    model = make_scaled(scaling)
    handle = rope_patch.patch(model, "yarn", factor=8, start="unscaled")
    assert handle.trained_length == ORIGINAL
    plain = make_model("llama", max_position_embeddings=ORIGINAL)
    rope_patch.patch(plain, "yarn", factor=8)
    assert logits(model).equal(logits(plain))


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
    assert (rotations > 4).any()
    assert (rotations < 1).any()
    torch.testing.assert_close(got.inv_freq[rotations > 4], start[rotations > 4], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        got.inv_freq[rotations < 1], start[rotations < 1] / 4, rtol=1e-6, atol=0
    )
    mscale = 0.1 * torch.log(torch.tensor(4.0, dtype=torch.float64)).item() + 1
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


@pytest.mark.parametrize("scaling", CONFIG_SCALINGS)
@pytest.mark.parametrize("method", STATIC)
def test_every_method_is_saved_natively_on_every_scaling(scaling, method, tmp_path):
    model = make_scaled(scaling)
    start = "running" if scaling in ("yarn", "linear") else "auto"
    handle = rope_patch.patch(model, method, factor=4, start=start)
    expected = {length: logits(model, length) for length in (SHORT, LONG)}
    rope_patch.save(model, tmp_path)
    # LongRoPE's config has one attention factor for both sets; YaRN's would change the short one.
    native = not (scaling == "longrope" and method == "yarn")
    assert rope_patch.pretrained.sidecar.read_sidecar(tmp_path)["native"] is native
    if native:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        for length, patched in expected.items():
            assert_close(logits(plain, length), patched)
    loaded = rope_patch.load(tmp_path)
    assert rope_patch.current(loaded).trained_length == handle.trained_length
    for length, patched in expected.items():
        assert_close(logits(loaded, length), patched)


@pytest.mark.parametrize("scaling", CONFIG_SCALINGS)
def test_undo_restores_the_config_scaling(scaling):
    model = make_scaled(scaling)
    before, parameters = logits(model), copy.deepcopy(model.config.rope_parameters)
    with rope_patch.patch(model, "ntk", factor=8):
        assert_differs(logits(model), before)
    assert logits(model).equal(before)
    assert model.config.rope_parameters == parameters


def test_start_running_refuses_dynamic_scalings():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}
    model = make_model("llama", rope_parameters=parameters)
    with pytest.raises(ValueError, match=r"start='running' needs frequencies that stay"):
        rope_patch.patch(model, "yarn", factor=2, start="running")


def test_unknown_start_is_refused():
    with pytest.raises(ValueError, match=r"start must be one of auto, unscaled, running, got 'x'"):
        rope_patch.patch(make_scaled("llama3"), "yarn", factor=2, start="x")


@pytest.mark.parametrize("method", [*STATIC, "proportional", "nope"])
def test_config_that_accepts_only_longrope_gets_longrope(method, tmp_path):
    """Phi-3's config accepts no rope_type but `longrope`."""
    model = make_model("phi3")
    rope_patch.patch(model, method, **({} if method == "nope" else {"factor": 4}))
    rope_patch.save(model, tmp_path)
    assert rope_patch.pretrained.sidecar.read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for length in (SHORT, LONG):
        assert_close(logits(plain, length), logits(model, length))


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear"])
@pytest.mark.parametrize("short_factor", [None, SHORT_FACTOR])
def test_two_sets_on_a_running_scaling_are_saved_as_two(tmp_path, scaling, short_factor):
    """Save LongRoPE on the config's own scaling: short texts have a set of their own."""
    model = make_scaled(scaling)
    stretches = {"long_factor": LONG_FACTOR, "short_factor": short_factor}
    rope_patch.patch(model, "longrope", factor=4, start="running", **stretches)
    model.save_pretrained(tmp_path)
    native = AutoModelForCausalLM.from_pretrained(tmp_path)
    for length in (SHORT, TRAINED, LONG):
        assert_close(logits(native, length), logits(model, length))


def test_three_sets_have_no_config_form():
    """LongRoPE on a LongRoPE has a set up to the original length, one to the trained, and one."""
    model = make_scaled("longrope")
    handle = rope_patch.patch(
        model, "longrope", factor=4, long_factor=LONG_FACTOR, short_factor=SHORT_FACTOR
    )
    assert not handle.method.has_config_form
