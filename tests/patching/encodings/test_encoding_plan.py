"""Requests that cannot be met for models that do not rotate, and patches upon patches."""

from __future__ import annotations

import pytest
import torch
from helpers.encoding_models import encoding_model, token_logits

import rope_patch

GPT2, T5, BLOOM = "GPT2LMHeadModel", "T5ForConditionalGeneration", "BloomForCausalLM"


@pytest.mark.parametrize(
    ("family", "method", "arguments", "message"),
    [
        (
            GPT2,
            "yarn",
            {"factor": 4},
            r"'yarn' does not extend .* \(learned\): expected one of lin",
        ),
        (GPT2, "cubik", {"factor": 4}, "did you mean 'cubic'"),
        (GPT2, "dynamic-linear", {}, "expected one of linear, cubic, tile"),
        (GPT2, "linear", {}, "exactly one of factor and length, got neither"),
        (GPT2, "linear", {"factor": 1}, "would change nothing"),
        (GPT2, "linear", {"factor": 0.5}, "at least 1"),
        (GPT2, "linear", {"factor": 2, "trained_length": 99}, "has 40 positions.*got trained"),
        (GPT2, "linear", {"factor": 2, "beta_fast": 3}, "no options for learned positions"),
        (GPT2, "linear", {"factor": 2, "kernels": "triton"}, "is for models that rotate"),
        (GPT2, "linear", {"factor": 2, "layer_types": ["encoder"]}, "this model has decoder"),
        (T5, "log-tail", {"factor": 2}, "name them, for example trained_length="),
        (T5, "log-tail", {"factor": 2, "trained_length": 16}, "at least 17 tokens"),
        (T5, "max-distance", {"factor": 1, "trained_length": 40}, "would change nothing"),
        (BLOOM, "ntk", {"factor": 2}, "name them, for example trained_length="),
        ("MPNetForMaskedLM", "linear", {"factor": 2}, "fixed numbers in mpnet.encoder"),
    ],
)
def test_refused_requests_change_nothing(family, method, arguments, message):
    model = encoding_model(family)
    before, config = token_logits(model, 20), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        rope_patch.patch(model, method, **arguments)
    assert rope_patch.current(model) is None
    assert model.config.to_dict() == config
    assert torch.equal(token_logits(model, 20), before)


def test_asking_a_model_draws_no_random_numbers():
    model = encoding_model(GPT2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rope_patch.patch(model, "linear", factor=2)
    assert torch.equal(torch.rand(2), expected)


def test_a_second_patch_replaces_the_first():
    model = encoding_model(GPT2)
    before = token_logits(model, 20)
    first = rope_patch.patch(model, "linear", factor=2)
    linear = token_logits(model, 20)
    with rope_patch.patch(model, "tile", factor=3) as second:
        assert rope_patch.current(model) is second
        assert not first.active
        assert torch.equal(token_logits(model, 20), before)
    assert rope_patch.current(model) is first
    assert torch.equal(token_logits(model, 20), linear)
    with pytest.raises(ValueError, match="does not extend"):
        rope_patch.patch(model, "yarn", factor=2)
    assert first.active
    rope_patch.unpatch(model)
    assert torch.equal(token_logits(model, 20), before)


def test_the_summary_says_what_changed():
    model = encoding_model(T5)
    handle = rope_patch.patch(model, "log-tail", factor=2, trained_length=40)
    assert handle.summary().splitlines()[0] == "log-tail, 40 → 80 tokens"
    assert "decoder.block.0.layer.0.SelfAttention: T5's buckets are exact below 16" in (
        handle.summary()
    )
    handle.undo()
    assert "(undone)" in handle.summary()
