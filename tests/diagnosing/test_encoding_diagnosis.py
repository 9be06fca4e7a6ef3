"""Test what `diagnose` says of models that do not rotate."""

import json

import pytest
from helpers.encoded_models import llama
from helpers.encoding_models import LENGTH, encoding_model

import rope_patch

EXPECTED = {
    "GPT2LMHeadModel": ("learned", LENGTH, "linear", "factor=4"),
    "XGLMForCausalLM": ("sinusoidal", LENGTH, "linear", "factor=4"),
    "BloomForCausalLM": ("alibi", None, "ntk", "factor=4, trained_length=..."),
    "T5ForConditionalGeneration": ("t5", None, "log-tail", "factor=4, trained_length=..."),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_positions_and_what_extends_them_are_named(tmp_path, family):
    kind, length, method, arguments = EXPECTED[family]
    model = encoding_model(family)
    model.save_pretrained(tmp_path)
    for subject in (model, str(tmp_path)):
        diagnosis = rope_patch.diagnose(subject)
        assert {site.kind for site in diagnosis.sites} == {kind}
        assert {site.trained_length for site in diagnosis.sites} == {length}
        assert method in diagnosis.sites[0].methods
        assert diagnosis.python.endswith(f'"{method}", {arguments})')
        assert "does not rotate: it tells positions by" in str(diagnosis)
        assert json.loads(json.dumps(diagnosis.to_dict()))["sites"][0]["kind"] == kind


def test_a_request_is_checked_and_described():
    model = encoding_model("GPT2LMHeadModel")
    diagnosis = rope_patch.diagnose(model, "cubic", factor=2)
    assert diagnosis.effect == ("transformer.wpe: learned table of 40 positions, now 80",)
    with pytest.raises(rope_patch.Refused, match="linear, cubic, tile"):
        rope_patch.diagnose(model, "yarn", factor=2)
    with pytest.raises(rope_patch.Refused, match="rope-patch picture"):
        diagnosis.plot("x.svg")


def test_the_line_of_python_does_what_it_says():
    model = encoding_model("WhisperForConditionalGeneration")
    line = rope_patch.diagnose(model).python
    assert "layer_types=['decoder']" in line
    exec(line, {"rope_patch": rope_patch, "model": model})
    assert rope_patch.current(model).length == 4 * LENGTH


def test_a_patch_is_told_live_and_saved(tmp_path):
    model = encoding_model("GPT2LMHeadModel")
    rope_patch.patch(model, "linear", factor=4)
    rope_patch.save(model, tmp_path)
    for subject in (model, str(tmp_path)):
        diagnosis = rope_patch.diagnose(subject, factor=2)
        assert diagnosis.patched == "linear, 40 → 160 tokens"
        assert diagnosis.effect == ("transformer.wpe: learned table of 40 positions, now 80",)


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("alibi", "alibi", "ntk"),
        ("t5", "t5", "log-tail"),
        ("learned", "learned", "linear"),
        ("sinusoidal", "sinusoidal", "linear"),
        ("integer", "counted", "linear"),
        ("normalised", "counted", "linear"),
    ],
)
def test_an_encoded_model_is_told_by_its_encoding(name, kind, method):
    model = llama(max_position_embeddings=64)
    rope_patch.encode(model, name)
    diagnosis = rope_patch.diagnose(model)
    assert {(site.kind, site.trained_length) for site in diagnosis.sites} == {(kind, 64)}
    assert "does not rotate" in str(diagnosis)
    exec(diagnosis.python, {"rope_patch": rope_patch, "model": model})
    assert str(rope_patch.current(model)).startswith(f"{method}, 64 → 256")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("kerple", "'kerple' cannot be extended"),
        ("binary", "'binary' cannot be extended"),
        ("none", "no positions"),
    ],
)
def test_an_encoding_without_methods_is_refused(name, match):
    model = llama()
    rope_patch.encode(model, name)
    with pytest.raises(rope_patch.Refused, match=match):
        rope_patch.diagnose(model)


@pytest.mark.parametrize("name", ["rope", "rnope", "xpos"])
def test_an_encoding_that_rotates_is_told_by_its_pairs(name):
    model = llama()
    rope_patch.encode(model, name)
    assert "theta 10000" in str(rope_patch.diagnose(model))
