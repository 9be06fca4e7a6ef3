"""Encoded models in folders: saved, loaded to the same bits, damaged."""

import json

import pytest
import torch
from helpers.encoded_models import NAMES, ONE_EACH, encoded, logits, tokens
from helpers.tokenizers import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.diagnosing import diagnose

EXTENDED = [
    ("alibi", {}, "ntk", {"factor": 4}),
    ("t5", {"buckets": 8}, "log-tail", {"factor": 4}),
    ("sinusoidal", {}, "linear", {"factor": 4}),
    ("none", {}, "nope", {"temperature": 1.3}),
    ("rope", {"p": 0.5}, "linear", {"factor": 4}),
    ("xpos", {}, "yarn", {"factor": 4}),
    ("rnope", {}, "yarn", {"factor": 4}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [*ONE_EACH, ("rope", {"partial": 0.5}), ("binary", {"base": 8, "digits": 3})],
    ids=[*NAMES, "partial rope", "octal"],
)
def test_a_saved_model_loads_to_the_same_bits(name, options, tmp_path):
    model = encoded(name, options)
    expected = logits(model, tokens())
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(logits(loaded, tokens()), expected)
    assert not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    rope_patch.save(loaded, tmp_path)  # over itself
    assert torch.equal(logits(rope_patch.load(tmp_path), tokens()), expected)
    rope_patch.encode(loaded, "none")
    rope_patch.encode(model, "none")
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("name", ["xpos", "rnope", "rope"])
def test_an_encoding_that_replaced_another_is_saved_alone(name, tmp_path):
    """What the config said of the first encoding must not come back with the second one."""
    model, expected = encoded("rope", {"base": 50.0}), encoded(name, {})
    encoded(name, {}, model)
    assert torch.equal(logits(model, tokens()), logits(expected, tokens()))
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(expected, tokens()))


@pytest.mark.parametrize(("name", "options", "method", "arguments"), EXTENDED)
def test_an_extension_is_saved_with_it(name, options, method, arguments, tmp_path):
    model = encoded(name, options)
    ids = tokens(count=40)
    plain = logits(model, ids)
    rope_patch.patch(model, method, **arguments)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    rope_patch.unpatch(loaded)
    assert torch.equal(logits(loaded, ids), plain)
    named = rope_patch.load(tmp_path, method, **arguments)
    assert torch.equal(logits(named, ids), logits(model, ids))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"factor": 4}, "factor goes with a method"),
        ({"method": "ntk", "factor": 4, "layer_types": ["encoder"]}, "this model has decoder"),
        ({"method": "ntk", "factor": 4, "start": "unscaled"}, "is for models that rotate"),
        ({"method": "ntk", "factor": 4, "kernels": "triton"}, "is for models that rotate"),
        ({"method": "yarn", "factor": 4}, "does not extend LlamaForCausalLM's positions"),
        ({"method": "ntk", "factor": 4, "gguf_file": "x.gguf"}, r"x\.gguf"),
    ],
)
def test_a_request_that_cannot_be_met_reads_no_weights(arguments, match, tmp_path):
    rope_patch.save(encoded("alibi", {}), tmp_path)
    if "gguf_file" not in arguments:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=match):
        rope_patch.load(tmp_path, **arguments)


def test_the_tokenizers_length_is_that_of_the_extension(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.model_max_length = 16
    model = encoded("alibi", {})
    rope_patch.patch(model, "ntk", factor=4)
    rope_patch.save(model, tmp_path, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 64


@pytest.mark.parametrize(("name", "warned"), [("alibi", True), ("rope", False)])
def test_a_warning_says_that_plain_transformers_loses_the_encoding(name, warned, tmp_path, caplog):
    rope_patch.save(encoded(name, {}), tmp_path)
    assert ("without the encoding" in caplog.text) == warned


def test_a_stretched_table_is_saved_as_it_was_trained_on(tmp_path):
    model = encoded("learned", {})
    rope_patch.patch(model, "linear", factor=4)
    with torch.no_grad():
        model.model.position_encoding.table.weight.add_(0.01)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    ids = tokens(count=60)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert rope_patch.current(loaded) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_kept(dtype, tmp_path):
    model = encoded("t5", {}).to(dtype)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_plain_transformers_reads_the_other_weights(tmp_path):
    model = encoded("learned", {})
    rope_patch.save(model, tmp_path)
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    rope_patch.encode(model, "rope")
    assert torch.equal(logits(plain, tokens()), logits(model, tokens()))


def test_partial_rope_needs_no_sidecar(tmp_path):
    model = encoded("rope", {"partial": 0.5})
    rope_patch.save(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain, tokens()), logits(model, tokens()))


def test_targets_are_made_or_refused(tmp_path):
    model = encoded("alibi", {})
    rope_patch.save(model, tmp_path / "new" / "folder")
    assert torch.equal(
        logits(rope_patch.load(tmp_path / "new" / "folder"), tokens()), logits(model, tokens())
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(rope_patch.Refused, match="is a file"):
        rope_patch.save(model, tmp_path / "file")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(rope_patch.Refused, match=r"holds adapter_config\.json"):
        rope_patch.save(model, tmp_path)


def test_adapters_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = peft.get_peft_model(encoded("t5", {}), config)
    with pytest.raises(rope_patch.Refused, match="merge the adapter first"):
        rope_patch.save(model, tmp_path)


def test_lost_weights_are_named(tmp_path):
    rope_patch.save(encoded("t5", {}), tmp_path)
    (tmp_path / "model-encoding.safetensors").unlink()
    with pytest.raises(rope_patch.Refused, match="lacks the trained parts of the encoding 't5'"):
        rope_patch.load(tmp_path)


def test_a_damaged_sidecar_is_named(tmp_path):
    rope_patch.save(encoded("t5", {}), tmp_path)
    path = tmp_path / "rope_patch.json"
    sidecar = json.loads(path.read_text())
    path.write_text(json.dumps({**sidecar, "options": 3}))
    with pytest.raises(rope_patch.Refused, match="damaged"):
        rope_patch.load(tmp_path)


def test_other_readers_of_sidecars_say_what_it_is(tmp_path):
    rope_patch.save(encoded("t5", {}), tmp_path)
    with pytest.raises(rope_patch.Refused, match=r"only rope_patch\.load reads"):
        diagnose(tmp_path)


def test_a_patched_model_replaces_it(tmp_path):
    model = encoded("t5", {})
    rope_patch.save(model, tmp_path)
    rope_patch.encode(model, "none").undo()
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, tmp_path)
    assert not (tmp_path / "model-encoding.safetensors").exists()
    assert torch.equal(logits(rope_patch.load(tmp_path), tokens()), logits(model, tokens()))
