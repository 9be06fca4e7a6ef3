"""Test that adapters record the rotation of their training, and load onto no other."""

import json
import logging
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    SHORT,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_model,
    tokens,
)
from lora_adapters import (
    METHODS,
    add_adapter,
    assert_logits,
    assert_untouched,
    base,
    peft,
    state,
)

import rope_patch

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_unpatched_base_is_patched_as_recorded(bases, saved_adapter, family, method, first):
    folder, expected = saved_adapter(method, family, first)
    model = base(bases, family)
    got = rope_patch.load_adapter(model, folder)
    assert isinstance(got, peft.PeftModel)
    assert not got.training
    assert rope_patch.current(got).method.name == method
    assert_logits(got, expected)
    assert_differs(logits(got), logits(base(bases, family)))
    assert_logits(rope_patch.load(folder), expected)


def test_save_writes_adapter_and_sidecar(bases, saved_adapter):
    folder, _ = saved_adapter()
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "rope_patch.json"} <= files
    assert not {"config.json", "model.safetensors"} & files
    sidecar = json.loads((folder / "rope_patch.json").read_text())
    assert (sidecar["method"], sidecar["options"]["beta_fast"]) == ("yarn", 16)
    assert sidecar["base_model"] == str(bases / "llama")
    assert sidecar["native"] is False


def test_trained_adapter_gives_the_same_logits_after_saving(tmp_path):
    """Train an adapter of the small trained model for some steps, save, load and merge it."""
    model = rope_patch.load(TINY, "yarn", factor=4)
    model = add_adapter(model, init_lora_weights=True, task_type="CAUSAL_LM")
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert all("lora_" in n for n, p in model.named_parameters() if p.requires_grad)
    ids = tokens(300)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    rope_patch.save(model, tmp_path / "adapter")
    loaded = rope_patch.load(tmp_path / "adapter")
    assert_logits(loaded, [logits(model, SHORT), logits(model, LONG)])

    plain = peft.PeftModel.from_pretrained(  # PEFT alone does not patch the base
        transformers.AutoModelForCausalLM.from_pretrained(TINY), tmp_path / "adapter"
    )
    assert_differs(logits(plain), logits(model))

    merged = loaded.merge_and_unload()
    assert rope_patch.current(merged) is not None
    rope_patch.save(merged, tmp_path / "merged")
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(native), logits(model), rtol=0, atol=1e-4)


EQUAL_PATCHES = {
    "the same words": ("yarn", {"factor": 4, "beta_fast": 16}),
    "a length": ("yarn", {"length": 4 * TRAINED, "beta_fast": 16}),
    "another method's words": ("abf", {"factor": 4, "new_theta": 1e4 * 4 ** (16 / 14)}),
    "a map's default": ("rerope", {"window": 20, "temperature": "log-n"}),
    "a trained length": ("dynamic-yarn", {"trained_length": TRAINED, "length": 8 * TRAINED}),
}


@pytest.mark.parametrize("case", EQUAL_PATCHES)
def test_base_with_an_equal_patch_is_accepted(bases, saved_adapter, case):
    method, options = EQUAL_PATCHES[case]
    folder, expected = saved_adapter("ntk" if method == "abf" else method)
    model = base(bases)
    handle = rope_patch.patch(model, method, **options)
    got = rope_patch.load_adapter(model, folder)
    assert rope_patch.current(got) is handle
    if method == "abf":
        assert_close(logits(got), expected[1])
    else:
        assert_logits(got, expected)


DIFFERENT_PATCHES = {
    "method": ("yarn", "linear", {"factor": 4}),
    "factor": ("yarn", "yarn", {"factor": 2, "beta_fast": 16}),
    "option": ("yarn", "yarn", {"factor": 4, "beta_slow": 0.2}),
    "attention factor": ("yarn", "yarn", {"factor": 4, "beta_fast": 16, "attention_factor": 1.1}),
    "trained length": ("yarn", "yarn", {"factor": 4, "beta_fast": 16, "trained_length": 32}),
    "growing": ("dynamic-yarn", "yarn", {"factor": 4}),
    "not growing": ("yarn", "dynamic-yarn", {}),
    "steps": ("dynamic-yarn", "dynamic-yarn", {"growth": "exact"}),
    "dynamic factor": ("dynamic", "dynamic", {"factor": 3}),
    "short sequences": ("mixed-yarn", "yarn", {"factor": 4}),
    "temperature": ("yarn", "yarn", {"factor": 4, "beta_fast": 16, "temperature": "log-n"}),
    "map": ("rerope", "self-extend", {"window": 20}),
    "map's option": ("rerope", "rerope", {"window": 30}),
    "map's temperature": ("rerope", "rerope", {"window": 20, "temperature": "none"}),
}


@pytest.mark.parametrize("case", DIFFERENT_PATCHES)
def test_base_with_a_different_patch_is_refused(bases, saved_adapter, case):
    trained, method, options = DIFFERENT_PATCHES[case]
    folder, _ = saved_adapter(trained)
    model = base(bases)
    handle = rope_patch.patch(model, method, **options)
    before, expected = state(model), logits(model)
    with pytest.raises(ValueError, match=r"(?s)was trained on a base.*unpatch") as error:
        rope_patch.load_adapter(model, folder)
    assert str(error.value).count(" → ") == 2  # shows both patches
    assert str(handle) in str(error.value)
    assert_untouched(model, before)
    assert logits(model).equal(expected)
    handle.undo()
    assert logits(model).equal(logits(base(bases)))
    assert logits(rope_patch.load_adapter(model, folder)).equal(saved_adapter(trained)[1][1])


def test_other_layer_types_are_refused(bases, saved_adapter):
    folder, expected = saved_adapter("linear", "gemma3", layer_types=["sliding_attention"])
    model = base(bases, "gemma3")
    rope_patch.patch(model, "linear", factor=4)
    before = state(model)
    with pytest.raises(ValueError, match=r"layers sliding_attention.*layers full_attention"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)
    rope_patch.patch(model, "linear", factor=4, layer_types=["sliding_attention"])
    assert_logits(rope_patch.load_adapter(model, folder), expected)


@pytest.mark.parametrize("trained", ["running", "unscaled"])
def test_base_with_another_start_is_refused(trained, tmp_path):
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    }
    sizes = {"rope_parameters": parameters, "max_position_embeddings": 2 * TRAINED}
    other = {"running": "unscaled", "unscaled": "running"}[trained]
    model = add_adapter(make_model(**sizes))
    rope_patch.patch(model, "linear", factor=4, start=trained)
    rope_patch.save(model, tmp_path)
    plain = make_model(**sizes)
    rope_patch.patch(plain, "linear", factor=4, start=other)
    with pytest.raises(ValueError, match="was trained on a base") as error:
        rope_patch.load_adapter(plain, tmp_path)
    assert str(error.value).count("running") == 1
    rope_patch.unpatch(plain)
    got = rope_patch.load_adapter(plain, tmp_path)
    assert logits(got).equal(logits(model))


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
def test_base_whose_config_has_the_rotation_is_not_patched(bases, saved_adapter, method, tmp_path):
    folder, expected = saved_adapter(method)
    model = base(bases)
    rope_patch.patch(model, method, **METHODS[method])
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = rope_patch.load_adapter(native, folder)
    assert rope_patch.current(got) is None
    assert_close(logits(got), expected[1])


def test_static_base_is_patched_for_a_dynamic_adapter(bases, saved_adapter, tmp_path):
    """The base's frequencies equal the recorded ones at one length only."""
    folder, expected = saved_adapter("dynamic-yarn", length=4 * TRAINED)
    model = base(bases)
    rope_patch.patch(model, "yarn", factor=4)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = rope_patch.load_adapter(native, folder)
    assert rope_patch.current(got).method.name == "dynamic-yarn"
    for length, expected_logits in zip((SHORT, LONG), expected, strict=True):
        assert_close(logits(got, length), expected_logits)


@pytest.mark.parametrize(
    ("method", "options"), [("yarn", {"temperature": "log-n"}), ("rerope", {"on": "yarn:4"})]
)
def test_what_no_config_says_is_patched_on_a_base_with_the_frequencies(
    bases, saved_adapter, method, options, tmp_path
):
    folder, expected = saved_adapter(method, **options)
    model = base(bases)
    yarn = METHODS["yarn"] if method == "yarn" else {"factor": 4}
    rope_patch.patch(model, "yarn", **yarn)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = rope_patch.load_adapter(native, folder)
    assert rope_patch.current(got).method.name == method
    assert_close(logits(got), expected[1])


def test_base_with_another_rotation_is_refused(saved_adapter):
    folder, _ = saved_adapter("yarn")
    model = make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    before = state(model)
    with pytest.raises(ValueError, match=r"would rotate LlamaForCausalLM otherwise.*500000"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)
    model = make_model(head_dim=32)
    with pytest.raises(ValueError, match="would rotate LlamaForCausalLM otherwise"):
        rope_patch.load_adapter(model, folder)


def test_base_that_cannot_be_patched_is_refused(saved_adapter):
    folder, _ = saved_adapter("linear", "gemma3")
    model = make_model()
    before = state(model)
    with pytest.raises(ValueError, match=r"which this one cannot be: .*rotates all layers alike"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)


def test_adapter_of_another_size_is_refused(saved_adapter, bases):
    folder, _ = saved_adapter("yarn")
    model = make_model(num_attention_heads=8)
    before, expected = state(model), logits(model)
    with pytest.raises(ValueError, match=rf"does not fit.*size mismatch.*{bases / 'llama'}"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)
    assert logits(model).equal(expected)


def test_adapter_without_a_sidecar_loads_with_a_warning(bases, without_sidecar, caplog):
    folder, expected = without_sidecar
    assert logits(rope_patch.load_adapter(base(bases), folder)).equal(expected)
    assert not caplog.text
    model = base(bases)
    handle = rope_patch.patch(model, "yarn", factor=4)
    got = rope_patch.load_adapter(model, folder)
    assert "nobody knows under which rotation" in caplog.text
    assert "yarn ×4" in caplog.text
    assert rope_patch.current(got) is handle
    caplog.clear()
    loaded = rope_patch.load(folder, "yarn", factor=4)
    assert logits(loaded).equal(logits(got))
    assert caplog.text.count("nobody knows") == 1
    with pytest.raises(ValueError, match=rf"name a method.*{folder} has no rope_patch.json"):
        rope_patch.load(folder)


def test_adapters_and_models_need_separate_folders(bases, saved_adapter, tmp_path):
    """In one folder, transformers would load the adapter on top of the merged model."""
    folder = Path(shutil.copytree(saved_adapter("yarn")[0], tmp_path / "adapter"))
    model = rope_patch.load(folder)
    model_folder = tmp_path / "whole"
    rope_patch.save(model.merge_and_unload(), model_folder)
    for target, other in (
        (folder, rope_patch.load(model_folder)),
        (model_folder, rope_patch.load(folder)),
    ):
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        with pytest.raises(ValueError, match="expected another folder"):
            rope_patch.save(other, target)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_save_logs_that_peft_alone_does_not_patch(bases, tmp_path, caplog):
    model = add_adapter(base(bases))
    rope_patch.patch(model, "yarn", factor=4)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        rope_patch.save(model, tmp_path)
    assert "PEFT alone patches nothing" in caplog.text
    assert "no form of its own" not in caplog.text


def test_missing_peft_error_names_the_extra(bases, saved_adapter, monkeypatch):
    folder, _ = saved_adapter("yarn")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    model = base(bases)
    before = state(model)
    with pytest.raises(ValueError, match=r"peft is not installed.*rope-patch\[train\]"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)


def test_load_adapter_emits_no_peft_warnings(bases, saved_adapter):
    folder, _ = saved_adapter("yarn")
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        rope_patch.load_adapter(base(bases), folder)
    assert not [warning for warning in caught_warnings if "adapter" in str(warning.message).lower()]
