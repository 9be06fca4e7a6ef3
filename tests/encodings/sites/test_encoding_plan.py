"""Requests that cannot be met for models that do not rotate, and patches upon patches."""

from __future__ import annotations

import pytest
import torch
from architectures.text_models import tiny_text_model
from helpers.encoded_models import llama
from helpers.encoding_models import encoding_model, token_logits
from helpers.releases import plain_transformers, require_model

import rope_patch
from rope_patch.encodings import EncodingFacts, encoding_facts

GPT2, T5, BLOOM = "GPT2LMHeadModel", "T5ForConditionalGeneration", "BloomForCausalLM"


LONGER = {"factor": 2, "trained_length": 40}
LARGEST = "relative_attention_max_distance"


@pytest.mark.parametrize(
    ("family", "method", "part", "kind", "table", "stated"),
    [
        (GPT2, "tile", "decoder", "learned", "weight", []),
        ("XGLMForCausalLM", "ntk", "decoder", "sinusoidal", "weights", []),
        (BLOOM, "ntk", "decoder", "alibi", None, []),
        (T5, "log-tail", None, "t5", None, []),
        (T5, "max-distance", None, "t5", None, [(LARGEST, 128, 512)] * 2),
        (T5, "max-distance", "decoder", "t5", None, []),  # the field is the encoder's, too
    ],
)
def test_facts_say_what_holds_positions(family, method, part, kind, table, stated):
    model, trained = encoding_model(family), 512 if family == T5 else 40
    plain, parts = encoding_facts(model), None if part is None else [part]
    handle = rope_patch.patch(model, method, factor=4, trained_length=trained, layer_types=parts)
    for facts in (plain, handle.facts):
        assert facts.kinds == kind
        assert {site.table for site in facts.sites} == {table}
    assert (plain.stated, handle.facts.stated) == ([], stated)
    grown = [len(now) - len(before) for _, _, before, now in handle.tables()]
    assert grown == ([] if table is None else [120])


NAMED = [("alibi", "alibi", "alibi"), ("kerple", "kerple", ""), ("none", "none", "")]


@pytest.mark.parametrize(("name", "replacement", "kinds"), [*NAMED, ("rope", None, "")])
def test_facts_name_an_encoding_unless_the_config_does(name, replacement, kinds):
    model = llama()
    assert encoding_facts(model) == EncodingFacts(())
    rope_patch.encode(model, name)
    assert encoding_facts(model).replacement == replacement
    assert encoding_facts(model).kinds == kinds


@pytest.mark.parametrize(
    ("family", "method", "arguments", "fact"),
    [
        (GPT2, "yarn", {"factor": 4}, r"\(learned\).* linear"),
        (GPT2, "cubik", {"factor": 4}, "did you mean 'cubic'"),
        (GPT2, "dynamic-linear", {}, "linear, cubic, tile"),
        (GPT2, "linear", {}, "factor and length"),
        (GPT2, "linear", {"factor": 1}, "would change nothing"),
        (GPT2, "linear", {"factor": 0.5}, "at least 1"),
        (GPT2, "linear", {"factor": 2, "trained_length": 99}, "40 positions"),
        (GPT2, "linear", {"factor": 2, "beta_fast": 3}, "no options"),
        (GPT2, "linear", {"factor": 2, "kernels": "triton"}, "models that rotate"),
        (GPT2, "linear", {"factor": 2, "layer_types": ["encoder"]}, "decoder"),
        (T5, "log-tail", {"factor": 2}, "trained_length="),
        (T5, "log-tail", {"factor": 2, "trained_length": 16}, "at least 17"),
        (T5, "max-distance", {"factor": 1, "trained_length": 40}, "would change nothing"),
        (BLOOM, "ntk", {"factor": 2}, "trained_length="),
        (BLOOM, "ntk", {**LONGER, "exakt": True}, "did you mean 'exact'"),
        (BLOOM, "ntk", {**LONGER, "exact": "yes"}, "True or False"),
        ("MptForCausalLM", "ntk", {**LONGER, "exact": True}, "no options.*MptForCausalLM"),
        ("MPNetForMaskedLM", "linear", {"factor": 2}, "fixed numbers"),
    ],
)
def test_refused_requests_change_nothing(family, method, arguments, fact):
    model = encoding_model(family)
    before, config = token_logits(model, 20), model.config.to_dict()
    with pytest.raises((ValueError, TypeError), match=fact):
        rope_patch.patch(model, method, **arguments)
    assert rope_patch.current(model) is None
    assert model.config.to_dict() == config
    assert torch.equal(token_logits(model, 20), before)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("deberta", "disentangled attention"),
        ("xlnet", r"sinusoids of distances .*r_r_bias"),
        ("wavlm", "gated by what each query holds"),
        ("prophetnet", "the one cannot be stretched without the other"),
        ("layoutlmv3", "columns of a linear map"),
        ("roformer", "rotates queries and keys by a fixed table"),
        ("inkling_text", "computed from the tokens"),
        ("reformer", "a grid of fixed shape"),
        ("luke", r"entity_embeddings\.position_embeddings\.weight grows with its length"),
        ("pegasus_x", "no table to stretch"),
        ("encoder-decoder", r"extend each by itself, for example rope_patch\.patch\(model\.dec"),
        ("mamba", "no positions to extend, and reads any length"),
        ("rwkv", "recurrence alone"),
    ],
)
def test_other_encodings_are_refused_with_the_reason(model_type, message):
    require_model(model_type)
    with plain_transformers():  # some releases build no encoder-decoder without its parts
        model = tiny_text_model(model_type)
    with pytest.raises(rope_patch.Refused, match=message):
        rope_patch.patch(model, "linear", factor=2, trained_length=64)
    assert rope_patch.current(model) is None


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
