"""Checkpoints whose own config scales their rotation: what a new method starts from."""

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

ORIGINAL = TRAINED // 4  # before the config's own scaling: 16 tokens, 64 with it
THETA = 1e4
PAIRS = 8
ORIGIN = {"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL}
OWN = {
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


def scaled(own, **changes):
    return make_model("llama", rope_parameters=copy.deepcopy(OWN[own]), **changes)


def running(own, seq_len=None):
    """Return transformers' frequencies and attention factor under a config's own scaling."""
    config = make_config("llama", rope_parameters=copy.deepcopy(OWN[own]))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[own](config, torch.device("cpu"), seq_len=seq_len)
    return inv_freq.double(), factor


def unscaled(theta=THETA):
    return theta ** (-torch.arange(PAIRS, dtype=torch.float64) / PAIRS)


@pytest.mark.parametrize("own", ["llama3", "longrope"])
@pytest.mark.parametrize("factor", [2, 3.5])
def test_what_was_trained_in_is_built_upon(own, factor):
    start, attention = running(own, seq_len=TRAINED)
    handle = rope_patch.patch(scaled(own), "linear", factor=factor)
    assert (handle.trained_length, handle.length) == (TRAINED, round(factor * TRAINED))
    got = handle.frequencies[None]
    torch.testing.assert_close(got.inv_freq, start / factor, rtol=1e-6, atol=0)
    assert got.attention_factor == pytest.approx(attention)
    assert f"the config's own {own}" in handle.summary()
    assert "what the model runs with" in handle.summary()


@pytest.mark.parametrize("own", ["yarn", "linear"])
def test_what_was_put_on_is_replaced(own):
    """As if the config had never been scaled."""
    model = scaled(own)
    handle = rope_patch.patch(model, "yarn", factor=8)
    assert (handle.trained_length, handle.length) == (ORIGINAL, 8 * ORIGINAL)
    plain = make_model("llama", max_position_embeddings=ORIGINAL)
    rope_patch.patch(plain, "yarn", factor=8)
    assert logits(model).equal(logits(plain))
    assert "in the place of the config's own" in handle.summary()


@pytest.mark.parametrize("own", ["llama3", "longrope"])
def test_start_unscaled_replaces_what_was_trained_in(own):
    model = scaled(own)
    handle = rope_patch.patch(model, "yarn", factor=8, start="unscaled")
    assert handle.trained_length == ORIGINAL
    plain = make_model("llama", max_position_embeddings=ORIGINAL)
    rope_patch.patch(plain, "yarn", factor=8)
    assert logits(model).equal(logits(plain))


@pytest.mark.parametrize("own", ["yarn", "linear"])
def test_start_running_builds_on_what_was_put_on(own):
    start, attention = running(own)
    handle = rope_patch.patch(scaled(own), "ntk", factor=2, start="running")
    assert handle.trained_length == TRAINED
    expected = start * unscaled(THETA * 2 ** (16 / 14)) / unscaled()
    torch.testing.assert_close(handle.frequencies[None].inv_freq, expected, rtol=1e-6, atol=0)
    assert handle.frequencies[None].attention_factor == pytest.approx(attention)


@pytest.mark.parametrize("own", ["llama3", "longrope"])
def test_pairs_are_told_by_the_turns_that_they_really_make(own):
    """YaRN's ramp over the running wavelengths: kept above 32 turns, divided below one."""
    start, attention = running(own, seq_len=1000)
    handle = rope_patch.patch(scaled(own), "yarn", factor=4, beta_fast=4, truncate=False)
    got = handle.frequencies[None]
    turns = TRAINED * start / (2 * torch.pi)
    assert (turns > 4).any()
    assert (turns < 1).any()
    torch.testing.assert_close(got.inv_freq[turns > 4], start[turns > 4], rtol=1e-6, atol=0)
    torch.testing.assert_close(got.inv_freq[turns < 1], start[turns < 1] / 4, rtol=1e-6, atol=0)
    law = 0.1 * torch.log(torch.tensor(4.0, dtype=torch.float64)).item() + 1
    assert got.attention_factor == pytest.approx(attention * law)


def test_two_sets_stay_two():
    """Short texts keep LongRoPE's short set, bit for bit; only the long one is stretched."""
    model = scaled("longrope")
    short, long = logits(model, ORIGINAL), logits(model, SHORT)
    handle = rope_patch.patch(model, "linear", factor=2)
    assert logits(model, ORIGINAL).equal(short)
    assert_differs(logits(model, SHORT), long)
    parameters = {**OWN["longrope"], "long_factor": [2 * f for f in LONG_FACTOR]}
    parameters["attention_factor"] = running("longrope")[1]
    native = make_native(model, "llama", rope_parameters=parameters)
    for length in (ORIGINAL, SHORT, LONG):
        assert_close(logits(model, length), logits(native, length))
    handle.undo()
    assert logits(model, SHORT).equal(long)


@pytest.mark.parametrize("own", ["llama3", "longrope"])
def test_following_methods_leave_the_own_scaling_alone_up_to_its_length(own):
    model = scaled(own)
    before = {n: logits(model, n) for n in (ORIGINAL, SHORT, TRAINED, LONG)}
    rope_patch.patch(model, "dynamic-yarn")
    for length in (ORIGINAL, SHORT, TRAINED):
        assert_close(logits(model, length), before[length])
    assert_differs(logits(model, LONG), before[LONG])


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("method", STATIC)
def test_every_method_is_saved_natively_on_every_start(own, method, tmp_path):
    model = scaled(own)
    start = "running" if own in ("yarn", "linear") else "auto"
    handle = rope_patch.patch(model, method, factor=4, start=start)
    expected = {length: logits(model, length) for length in (SHORT, LONG)}
    rope_patch.save(model, tmp_path)
    # LongRoPE has one attention factor for both of its sets: YaRN's would change the short one.
    native = not (own == "longrope" and method == "yarn")
    assert rope_patch.pretrained.saving.read_sidecar(tmp_path)["native"] is native
    if native:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        for length, wanted in expected.items():
            assert_close(logits(plain, length), wanted)
    again = rope_patch.load(tmp_path)
    assert rope_patch.current(again).trained_length == handle.trained_length
    for length, wanted in expected.items():
        assert_close(logits(again, length), wanted)


@pytest.mark.parametrize("own", OWN)
def test_undo_goes_back_to_the_own_scaling(own):
    model = scaled(own)
    before, said = logits(model), copy.deepcopy(model.config.rope_parameters)
    with rope_patch.patch(model, "ntk", factor=2):
        assert_differs(logits(model), before)
    assert logits(model).equal(before)
    assert model.config.rope_parameters == said


def test_no_one_set_of_frequencies_to_start_from():
    own = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}
    model = make_model("llama", rope_parameters=own)
    with pytest.raises(ValueError, match=r"start='running' needs frequencies that stay"):
        rope_patch.patch(model, "yarn", factor=2, start="running")


def test_a_start_that_is_none():
    with pytest.raises(ValueError, match=r"start must be one of auto, unscaled, running, got 'x'"):
        rope_patch.patch(scaled("llama3"), "yarn", factor=2, start="x")


@pytest.mark.parametrize("method", [*STATIC, "proportional", "nope"])
def test_a_config_that_knows_one_scaling_only_is_given_that(method, tmp_path):
    """Phi-3's refuses all names but `longrope`."""
    model = make_model("phi3")
    rope_patch.patch(model, method, **({} if method == "nope" else {"factor": 4}))
    rope_patch.save(model, tmp_path)
    assert rope_patch.pretrained.saving.read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for length in (SHORT, LONG):
        assert_close(logits(plain, length), logits(model, length))
