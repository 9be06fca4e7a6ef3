"""Test that diagnose tells frequencies that were never computed from edited ones."""

import copy
import math

import pytest
import torch
from architectures.tiny_architectures import tiny_config, tiny_model
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    logits,
    make_model,
)
from transformers import AutoModelForCausalLM

import rope_patch

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
LONGROPE = {
    **YARN,
    "rope_type": "longrope",
    "long_factor": LONG_FACTOR,
    "short_factor": SHORT_FACTOR,
}
PLAIN = 1e4 ** (-torch.arange(0, 16, 2) / 16)
LOST = "frequencies-not-initialised"


def codes(model):
    return [f.code for f in rope_patch.diagnose(model).findings if f.severity != "note"]


def yarn_model():
    return make_model("llama", rope_parameters=dict(YARN), max_position_embeddings=TARGET)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.zeros(8), "all are zero"),
        (PLAIN * torch.tensor([1, 1, 1, 1, 1, 1, 1, float("nan")]), "1 of 8 are NaN or infinite"),
        (torch.tensor([1e-14, 4e-41, -1e-28, 3e-41, 3e-41, 1e-3, 1e-4, 1e-5]), "4 of 8 are zero"),
        (torch.tensor([0.5, 7e9, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4]), "1 of 8 are zero, negative"),
        (PLAIN.roll(1), "far faster than the pair before"),
        (PLAIN, "nothing scales them as the config's 'yarn'"),
    ],
)
def test_values_of_lost_frequencies(values, words):
    model = yarn_model()
    before = logits(model)
    model.model.rotary_emb.inv_freq.copy_(values)
    assert not torch.equal(logits(model), before)
    (finding,) = rope_patch.diagnose(model).findings
    assert finding.code == LOST
    assert words in finding.evidence
    exec(finding.fix, {"rope_patch": rope_patch, "model": model})
    assert torch.equal(logits(model), before)
    assert rope_patch.diagnose(model).healthy


def test_numbers():
    model = yarn_model()
    model.model.rotary_emb.inv_freq.zero_()
    (finding,) = rope_patch.diagnose(model).findings
    assert finding.numbers == {"pairs": 8, "zeros": 8, "largest": 0.0}


@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_both_buffers_of_longrope(name):
    model = make_model("llama", rope_parameters=dict(LONGROPE), max_position_embeddings=TARGET)
    expected = codes(model)
    getattr(model.model.rotary_emb, name).zero_()
    assert codes(model) == [LOST, *expected]
    rope_patch.restore(model)
    assert codes(model) == expected


def test_meta_buffer_beside_real_weights():
    model = make_model()
    assert codes(make_model().to("meta")) == []  # weights and all are still to come
    model.model.rotary_emb.inv_freq = PLAIN.to("meta")
    assert codes(model) == [LOST]


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
def test_layer_type_is_named():
    model = make_model("gemma3")
    model.model.rotary_emb.sliding_attention_inv_freq.zero_()
    finding = rope_patch.diagnose(model).findings[0]
    assert (finding.code, finding.layer_type) == (LOST, "sliding_attention")
    assert codes(model) == [LOST]


def test_rounded_and_edited_frequencies_are_not_lost_ones():
    assert codes(yarn_model().half()) == ["cast-frequencies"]
    edited = make_model()
    edited.config.rope_parameters["rope_theta"] = 5e5
    assert codes(edited) == ["config-edited-after-load"]
    other_factor = yarn_model()
    other_factor.config.rope_parameters["factor"] = 2.0
    other_factor.config.max_position_embeddings = 2 * TRAINED
    assert "config-edited-after-load" in codes(other_factor)
    assert LOST not in codes(other_factor)


def test_uneven_factors_of_a_config_are_not_lost_frequencies():
    uneven = [1.0, 60.0] * 4
    parameters = {**LONGROPE, "long_factor": uneven, "short_factor": uneven}
    model = make_model("llama", rope_parameters=parameters, max_position_embeddings=TARGET)
    assert LOST not in codes(model)
    model.model.rotary_emb.inv_freq.copy_(PLAIN.roll(1))
    assert LOST in codes(model)


def test_patched_model_that_transformers_initialised_again():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    patched = logits(model)
    assert codes(model) == []
    model._init_weights(model.model.rotary_emb)  # writes the plain frequencies
    assert not torch.equal(logits(model), patched)
    assert codes(model) == [LOST]
    rope_patch.restore(model)
    assert codes(model) == []
    assert torch.equal(logits(model), patched)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (5e5 ** (-torch.arange(0, 16, 2) / 16), "inv_freq holds the frequencies of theta 500,000"),
        ((5e5 ** (-torch.arange(0, 16, 2) / 16)).bfloat16(), "the frequencies of theta 500,000"),
        (PLAIN / 4, "inv_freq holds the config's frequencies, all times 0.25"),
        (PLAIN * (1 + 0.01 * torch.arange(8)), "inv_freq holds other frequencies"),
        (PLAIN[:4], "inv_freq holds 4 frequencies instead of 8"),
    ],
)
def test_overwritten_frequencies_are_no_edited_config(values, words):
    model = make_model()
    before = logits(model)
    model.model.rotary_emb.inv_freq = values.clone()
    (finding,) = rope_patch.diagnose(model).findings
    assert finding.code == "frequencies-overwritten"
    assert words in finding.evidence
    exec(finding.fix, {"rope_patch": rope_patch, "model": model})
    assert torch.equal(logits(model), before)
    assert codes(model) == []


def test_overwritten_attention_factor_is_no_edited_config():
    model = make_model()
    model.model.rotary_emb.attention_scaling = 1.3
    (finding,) = rope_patch.diagnose(model).findings
    assert finding.code == "frequencies-overwritten"
    assert "attention_scaling is 1.3: 0 of 8 pairs differ" in finding.evidence
    assert rope_patch.restore(model) == ["model.rotary_emb.attention_scaling"]


def latent_model():
    """Return a tiny DeepSeek-V3 whose YaRN has its attention factor in the softmax scale."""
    config = copy.deepcopy(tiny_config("deepseek_v3"))
    trained = config.max_position_embeddings
    config.max_position_embeddings = 4 * trained
    config.rope_parameters = {
        **config.rope_parameters,
        **YARN,
        "original_max_position_embeddings": trained,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return AutoModelForCausalLM.from_config(config).eval()


def test_softmax_scale_that_lost_mscale_is_named_and_restored():
    """DeepSeek multiplies it by mscale squared, which a plain reimplementation forgets."""
    model = latent_model()
    before = logits(model)
    assert codes(model) == []
    assert rope_patch.restore(model) == []
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5
    assert not torch.equal(logits(model), before)
    (finding,) = rope_patch.diagnose(model).findings
    assert finding.code == "softmax-scale-lost"
    assert finding.numbers["attentions"] == len(model.model.layers)
    assert finding.numbers["ratio"] == pytest.approx((0.1 * math.log(4) + 1) ** -2)
    assert "squared (mscale), was lost" in finding.what
    names = [f"model.layers.{i}.self_attn.scaling" for i in range(len(model.model.layers))]
    assert rope_patch.restore(model) == names
    assert torch.equal(logits(model), before)
    assert codes(model) == []


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_softmax_scale_of_a_patch_is_restored_and_undone(method):
    model = tiny_model("deepseek_v3")
    plain = logits(model)
    handle = rope_patch.patch(model, method, factor=4)
    patched = logits(model)
    assert codes(model) == []
    model.model.layers[0].self_attn.scaling *= 1.5
    assert codes(model) == ["softmax-scale-lost"]
    assert rope_patch.restore(model) == ["model.layers.0.self_attn.scaling"]
    assert torch.equal(logits(model), patched)
    handle.undo()
    assert torch.equal(logits(model), plain)
