"""Test layer types with different scalings in their config: each is extended from its own."""

import copy

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
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_model,
    make_native,
)
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.patching import check
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.pretrained.sidecar import read_sidecar

ORIGINAL, PAIRS = TRAINED // 4, 8
FULL, WINDOWS = "full_attention", "sliding_attention"
BOTH = [FULL, WINDOWS]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "long_factor": LONG_FACTOR,
    "short_factor": SHORT_FACTOR,
    "attention_factor": 1.25,
    "rope_theta": 1e3,
    "original_max_position_embeddings": ORIGINAL,
}
OTHER = {
    **LONGROPE,
    "long_factor": [1 + 0.2 * pair for pair in range(PAIRS)],
    "short_factor": [1 + 0.1 * pair for pair in range(PAIRS)],
    "attention_factor": 1.1,
    "rope_theta": 1e4,
}


def make_gemma3(full, windows):
    parameters = {FULL: copy.deepcopy(full), WINDOWS: copy.deepcopy(windows)}
    return make_model("gemma3", rope_parameters=parameters)


def expected_inv_freq(parameters, stretch, factor):
    unscaled = parameters["rope_theta"] ** (-np.arange(PAIRS) / PAIRS)
    if parameters["rope_type"] == "longrope":
        return torch.tensor(unscaled / parameters[stretch] / factor)
    rotations = ORIGINAL * unscaled / (2 * np.pi)
    ramp = np.clip((rotations - 1) / 3, 0, 1)
    return torch.tensor((unscaled * ramp + unscaled / 4 * (1 - ramp)) / factor)


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
    patched = {length: logits(model, length) for length in before}
    assert_differs(patched[SHORT], before[SHORT])
    rope_patch.save(model, tmp_path)
    assert read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    loaded = rope_patch.load(tmp_path)
    for length, expected in patched.items():
        assert_close(logits(plain, length), expected)
        assert_close(logits(loaded, length), expected)
    handle.undo()
    assert logits(model).equal(before[LONG])


def test_summary_names_every_scaling():
    handle = rope_patch.patch(make_gemma3(LLAMA3, OTHER), "linear", factor=2, layer_types=BOTH)
    assert "linear ×2 on the config's own llama3 and longrope" in handle.summary()


@pytest.mark.parametrize(("full", "windows"), [(LLAMA3, OTHER), (OTHER, LLAMA3)])
def test_attention_factor_beside_a_short_set_is_not_native(full, windows, tmp_path):
    """LongRoPE's config has one attention factor for both sets."""
    model = make_gemma3(full, windows)
    handle = rope_patch.patch(model, "yarn", factor=2, layer_types=BOTH)
    assert not handle.method.has_config_form
    rope_patch.save(model, tmp_path)
    assert not read_sidecar(tmp_path)["native"]
    loaded = rope_patch.load(tmp_path)
    for length in (ORIGINAL, SHORT, LONG):
        assert_close(logits(loaded, length), logits(model, length))


def test_short_sets_that_end_at_different_lengths_are_refused():
    model = make_gemma3(LONGROPE, {**OTHER, "original_max_position_embeddings": 2 * ORIGINAL})
    with plain_transformers():
        before = logits(model)
        assert logits(model).equal(before)
    with pytest.raises(ValueError, match=r"at one length.*full_attention: 16, sliding_att.*: 32"):
        rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    assert logits(model).equal(before)
    rope_patch.patch(model, "linear", factor=2)  # the full layers alone
    assert_differs(logits(model), before)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
def test_layer_types_that_start_at_different_lengths_are_refused():
    """yarn is replaced from its original length, llama3 extended from its scaled one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    model = make_gemma3({**yarn, "rope_theta": 1e6}, LLAMA3)
    before = logits(model)
    with pytest.raises(ValueError, match=r"must start at one length, got 16 tokens for full"):
        rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    assert logits(model).equal(before)
    rope_patch.patch(model, "linear", factor=8)  # the full layers alone
    assert_differs(logits(model), before)


def test_nope_replaces_the_short_set_too(tmp_path):
    """Apply `nope` to a config with a short and a long set: neither rotates."""
    parameters = {**LONGROPE, "attention_factor": 1.0}
    model = make_model("llama", rope_parameters=parameters)
    handle = rope_patch.patch(model, "nope")
    assert not handle.frequencies_at(1)[None].inv_freq.any()
    unrotated = {"rope_type": "linear", "factor": 1e18, "rope_theta": 1e4}
    native = make_native(model, "llama", rope_parameters=unrotated)
    for length in (ORIGINAL, LONG):
        assert_close(logits(model, length), logits(native, length))
    rope_patch.save(model, tmp_path)
    if OLD_TRANSFORMERS:
        return  # its configs cannot say that nothing rotates
    assert read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for length in (ORIGINAL, LONG):
        assert_close(logits(plain, length), logits(model, length))


def test_check_builds_one_rotary_module(monkeypatch):
    """Checking a request builds one rotary module, both to read frequencies and to probe."""
    model = make_model("llama")
    (rotary,) = find_rotaries(model)
    kind, instances = type(rotary.module), []
    init = kind.__init__

    def record_and_init(self, *args, **kwargs):
        instances.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__init__", record_and_init)
    check(model, "linear", factor=2, kernels="hf")
    assert len(instances) == 1
