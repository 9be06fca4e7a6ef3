"""Layer types with different scalings of their own, each continued from its own."""

import copy

import numpy as np
import pytest
import torch
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
from rope_patch.pretrained.saving import read_sidecar

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


switches = pytest.mark.skipif(
    OLD_TRANSFORMERS, reason="transformers 5.0 fails over LongRoPE in layer types"
)


def model_of(full, windows):
    spelled = {FULL: copy.deepcopy(full), WINDOWS: copy.deepcopy(windows)}
    return make_model("gemma3", rope_parameters=spelled)


def expected(own, stretch, factor):
    unscaled = own["rope_theta"] ** (-np.arange(PAIRS) / PAIRS)
    if own["rope_type"] == "longrope":
        return torch.tensor(unscaled / own[stretch] / factor)
    turns = ORIGINAL * unscaled / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    return torch.tensor((unscaled * kept + unscaled / 4 * (1 - kept)) / factor)


@switches
@pytest.mark.parametrize(
    ("full", "windows"), [(LONGROPE, OTHER), (LLAMA3, OTHER), (LONGROPE, LLAMA3)]
)
def test_each_layer_type_keeps_its_own_two_sets(full, windows, tmp_path):
    model = model_of(full, windows)
    before = {length: logits(model, length) for length in (ORIGINAL, SHORT, LONG)}
    handle = rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    for kind, own in ((FULL, full), (WINDOWS, windows)):
        factor = own.get("attention_factor", 1)
        for length, stretch in ((1, "short_factor"), (SHORT, "long_factor")):
            got = handle.frequencies_at(length)[kind]
            # One set is all that llama3 has: it is stretched for sequences of every length.
            by = 1 if length == 1 and own["rope_type"] == "longrope" else 2
            wanted = expected(own, stretch, by)
            torch.testing.assert_close(got.inv_freq, wanted, rtol=1e-6, atol=0)
            assert got.attention_factor == pytest.approx(factor)
    if LLAMA3 not in (full, windows):
        assert logits(model, ORIGINAL).equal(before[ORIGINAL])
    patched = {length: logits(model, length) for length in before}
    assert_differs(patched[SHORT], before[SHORT])
    rope_patch.save(model, tmp_path)
    assert read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again = rope_patch.load(tmp_path)
    for length, wanted in patched.items():
        assert_close(logits(plain, length), wanted)
        assert_close(logits(again, length), wanted)
    handle.undo()
    assert logits(model).equal(before[LONG])


def test_the_summary_names_every_scaling():
    handle = rope_patch.patch(model_of(LLAMA3, OTHER), "linear", factor=2, layer_types=BOTH)
    assert "linear ×2 on the config's own llama3 and longrope" in handle.summary()


@pytest.mark.parametrize(("full", "windows"), [(LLAMA3, OTHER), (OTHER, LLAMA3)])
def test_a_sharpened_long_set_beside_a_short_one_is_not_native(full, windows, tmp_path):
    """LongRoPE has one attention factor for both sets, whichever layer type it is of."""
    model = model_of(full, windows)
    handle = rope_patch.patch(model, "yarn", factor=2, layer_types=BOTH)
    assert not handle.method.has_config_form
    rope_patch.save(model, tmp_path)
    assert not read_sidecar(tmp_path)["native"]
    again = rope_patch.load(tmp_path)
    for length in (ORIGINAL, SHORT, LONG):
        assert_close(logits(again, length), logits(model, length))


@switches
def test_short_sets_that_end_at_different_lengths_are_refused():
    model = model_of(LONGROPE, {**OTHER, "original_max_position_embeddings": 2 * ORIGINAL})
    before = logits(model)
    with pytest.raises(ValueError, match=r"at one length.*full_attention: 16, sliding_att.*: 32"):
        rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    assert logits(model).equal(before)
    rope_patch.patch(model, "linear", factor=2)  # the full layers alone
    assert_differs(logits(model), before)


def test_layer_types_that_start_at_different_lengths_are_refused():
    """One is extended from where its own scaling came from, the other from where it went to."""
    own = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    model = model_of({**own, "rope_theta": 1e6}, LLAMA3)
    before = logits(model)
    with pytest.raises(ValueError, match=r"must start at one length, got 16 tokens for full"):
        rope_patch.patch(model, "linear", factor=2, layer_types=BOTH)
    assert logits(model).equal(before)
    rope_patch.patch(model, "linear", factor=2)  # the full layers alone
    assert_differs(logits(model), before)


def test_nothing_rotates_in_short_sequences_either(tmp_path):
    """No rotation leaves no short set."""
    own = {**LONGROPE, "attention_factor": 1.0}
    model = make_model("llama", rope_parameters=own)
    handle = rope_patch.patch(model, "nope")
    assert not handle.frequencies_at(1)[None].inv_freq.any()
    unrotated = {"rope_type": "linear", "factor": 1e18, "rope_theta": 1e4}
    native = make_native(model, "llama", rope_parameters=unrotated)
    for length in (ORIGINAL, LONG):
        assert_close(logits(model, length), logits(native, length))
    rope_patch.save(model, tmp_path)
    if OLD_TRANSFORMERS:
        return  # it cannot say that nothing rotates
    assert read_sidecar(tmp_path)["native"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for length in (ORIGINAL, LONG):
        assert_close(logits(plain, length), logits(model, length))


def test_transformers_own_frequencies_are_computed_once(monkeypatch):
    """Checking a request makes a rotary module of a kind twice: to read it, and to try it."""
    model = make_model("llama")
    (rotary,) = find_rotaries(model)
    kind, made = type(rotary.module), []
    init = kind.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__init__", counted)
    check(model, "linear", factor=2, kernels="hf")
    assert len(made) == 2
