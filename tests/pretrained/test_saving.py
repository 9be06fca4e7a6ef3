"""Test that saved folders load in plain transformers, and that saving is all or nothing."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    SIZES,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_config,
    make_model,
)
from transformers import modeling_rope_utils

import rope_patch
from rope_patch.pretrained.sidecar import extension_from_sidecar

METHODS = {
    "linear": {},
    "yarn": {"beta_fast": 16},
    "ntk": {},
    "ntk-by-parts": {},
    "llama3": {},
    "longrope": {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
    "abf": {},
    "proportional": {"partial_rotary_factor": 0.5},
    "dynamic": {"growth": "exact"},
    "dynamic-yarn": {"growth": "exact"},
}


def is_native(family, method):
    """Return whether transformers has a native form; 5.0 cannot read or switch nested scalings."""
    if method == "dynamic-yarn":
        return False
    nested = family == "gemma3" and method in ("yarn", "ntk-by-parts", "longrope", "dynamic")
    return not (OLD_TRANSFORMERS and (nested or method == "proportional"))


def save_patched(folder, family="llama", method="yarn", **options):
    model = make_model(family)
    rope_patch.patch(model, method, factor=4, **options)
    rope_patch.save(model, folder)
    return model


def sidecar(folder):
    return json.loads((folder / "rope_patch.json").read_text())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_plain_transformers_loads_the_same_model(family, method, tmp_path):
    model = save_patched(tmp_path, family, method, **METHODS[method])
    if not is_native(family, method):
        assert method in ("longrope", "dynamic") or sidecar(tmp_path)["native"] is False
        return
    assert sidecar(tmp_path)["native"] is True
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert rope_patch.current(native) is None
    # transformers' dynamic scaling takes this field for the trained length.
    expected = TRAINED if method == "dynamic" else TARGET
    assert native.config.max_position_embeddings == expected
    for length in (SHORT, LONG):
        assert_close(logits(native, length), logits(model, length))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_load_restores_the_patch(family, method, tmp_path):
    plain = logits(make_model(family))
    model = save_patched(tmp_path, family, method, **METHODS[method])
    loaded = rope_patch.load(tmp_path)
    handle, saved_handle = rope_patch.current(loaded), rope_patch.current(model)
    assert handle.method == saved_handle.method
    assert (handle.trained_length, handle.length) == (
        saved_handle.trained_length,
        saved_handle.length,
    )
    for length in (SHORT, LONG):
        assert logits(loaded, length).equal(logits(model, length))
    assert_differs(logits(loaded), plain)
    handle.undo()
    assert logits(loaded).equal(plain)
    assert loaded.config.max_position_embeddings == TRAINED
    assert loaded.config.rope_parameters == make_config(family).rope_parameters


def test_missing_native_form_is_logged(tmp_path, caplog):
    # Partly rotated heads, too: transformers' proportional rotation counts whole heads.
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)).eval()
    rope_patch.patch(model, "proportional", factor=4, partial_rotary_factor=0.5)
    rope_patch.save(model, tmp_path)
    assert sidecar(tmp_path)["native"] is False
    assert "with rope_patch.load" in caplog.text
    assert logits(rope_patch.load(tmp_path)).equal(logits(model))


def test_sidecar_records_the_patch(tmp_path):
    model = save_patched(tmp_path, "gemma3", "yarn", beta_fast=16)
    record = sidecar(tmp_path)
    handle = rope_patch.current(model)
    assert record["method"] == "yarn"
    fields = {f.name: record[f.name] for f in dataclasses.fields(rope_patch.Extension)}
    assert rope_patch.Extension.from_dict(fields) == handle.extension
    assert {"factor": record["factor"], **record["options"]} == handle.method.options()
    assert (record["factor"], record["options"]["beta_fast"]) == (4.0, 16)
    assert (record["trained_length"], record["target_length"]) == (TRAINED, TARGET)
    assert record["layer_types"] == ["full_attention"]
    assert record["original"] == {
        "max_position_embeddings": TRAINED,
        "rope_parameters": make_config("gemma3").rope_parameters,
    }
    assert record["transformers"] == transformers.__version__
    frequencies = record["frequencies"]["full_attention"]
    expected = handle.frequencies["full_attention"]
    assert torch.tensor(frequencies["inv_freq"], dtype=torch.float64).equal(expected.inv_freq)
    assert frequencies["attention_factor"] == expected.attention_factor


def test_save_leaves_the_model_patched(tmp_path):
    model = make_model()
    plain = logits(model)
    handle = rope_patch.patch(model, "yarn", factor=4)
    patched = logits(model)
    rope_patch.save(model, tmp_path / "new" / "folder")
    assert rope_patch.current(model) is handle
    assert logits(model).equal(patched)
    handle.undo()
    assert logits(model).equal(plain)


def test_save_of_bfloat16_keeps_exact_frequencies(tmp_path):
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4, kernels="hf")  # our kernels round less often
    model.to(torch.bfloat16)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert native.dtype == torch.bfloat16
    assert logits(native).equal(logits(model))


def test_save_removes_stale_weights(tmp_path, monkeypatch):
    save_patched(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    (tmp_path / "notes.md").write_text("mine")
    model = make_model(seed=5)
    rope_patch.patch(model, "yarn", factor=4)
    save_pretrained = model.save_pretrained
    monkeypatch.setattr(
        model, "save_pretrained", lambda path: save_pretrained(path, max_shard_size="20KB")
    )
    rope_patch.save(model, tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "notes.md").read_text() == "mine"
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(logits(native), logits(model))

    monkeypatch.undo()
    rope_patch.save(model, tmp_path)  # and back to one file
    assert not list(tmp_path.glob("model-*")) + list(tmp_path.glob("*.index.json"))
    assert logits(rope_patch.load(tmp_path)).equal(logits(model))


@pytest.mark.parametrize("when", ["before", "midway"])
def test_failing_save_leaves_the_folder_unchanged(when, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    first_model = save_patched(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = make_model(seed=5)
    rope_patch.patch(model, "linear", factor=2)
    save_pretrained = model.save_pretrained

    def failing(path):
        if when == "midway":
            save_pretrained(path)
            (path / "config.json").unlink()
        raise OSError("No space left on device")

    monkeypatch.setattr(model, "save_pretrained", failing)
    with pytest.raises(OSError, match="No space left"):
        rope_patch.save(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no leftovers beside it
    assert logits(rope_patch.load(folder)).equal(logits(first_model))


def test_weights_are_in_place_before_what_describes_them(tmp_path, monkeypatch):
    """A kill between two moves leaves no config or index of weights that are not there."""
    folder, moved, replace = tmp_path / "model", [], Path.replace

    def record(path, target):
        if target.parent == folder:
            moved.append(target)
        return replace(path, target)

    model = make_model()
    rope_patch.patch(model, "linear", factor=2)
    save_pretrained = model.save_pretrained
    monkeypatch.setattr(
        model, "save_pretrained", lambda path: save_pretrained(path, max_shard_size="20KB")
    )
    monkeypatch.setattr(Path, "replace", record)
    rope_patch.save(model, folder)
    kinds = [path.suffix for path in moved]
    assert kinds.count(".safetensors") > 2
    assert set(kinds[kinds.index(".json") :]) == {".json"}


def test_failing_first_save_leaves_no_folder(tmp_path, monkeypatch):
    model = make_model()
    rope_patch.patch(model, "linear", factor=2)

    def failing(path):
        raise OSError("No space left on device")

    monkeypatch.setattr(model, "save_pretrained", failing)
    with pytest.raises(OSError, match="No space left"):
        rope_patch.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_save_refuses_unpatched_models_and_files(tmp_path):
    model = make_model()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not patched.*save_pretrained"):
        rope_patch.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.write_text("mine")
    rope_patch.patch(model, "linear", factor=2)
    with pytest.raises(ValueError, match=f"{file} is a file"):
        rope_patch.save(model, file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_folder_that_transformers_cannot_load_is_logged(family, tmp_path, caplog, monkeypatch):
    """Remove the scaling from transformers' table, as in transformers 5.0."""
    monkeypatch.delitem(modeling_rope_utils.ROPE_INIT_FUNCTIONS, "proportional", raising=False)
    save_patched(tmp_path, family, "proportional", partial_rotary_factor=0.5)
    assert "cannot load this folder at all (KeyError: 'proportional')" in caplog.text
    assert "rope_patch.load, or with transformers 5.5 or later" in caplog.text
    assert sidecar(tmp_path)["native"] is False
    with pytest.raises(KeyError):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    caplog.clear()
    save_patched(tmp_path / "other", family, "dynamic-yarn")
    assert "has no form of its own" in caplog.text
    assert "at all" not in caplog.text


@pytest.mark.parametrize(("stored", "temperature"), [(0.412, "drope:0.412"), (0.0, None)])
def test_temperature_of_nope_from_0_1_keeps_its_meaning(stored, temperature):
    """There a number was the coefficient of the logarithm, and growth an option of nope."""
    request = {"method": "nope", "trained_length": TRAINED, "layer_types": None, "length": None}
    options = {"factor": 1.0, "growth": "stepped", "temperature": stored}
    extension = extension_from_sidecar({**request, "options": options})
    handle = rope_patch.patch(make_model(), extension)
    assert handle.method.temperature == temperature


@pytest.mark.parametrize("growth", ["stepped", "exact", "admission"])
def test_dynamic_is_native_where_one_pass_of_any_length_is_equal(growth, tmp_path, caplog):
    """transformers' own dynamic grows with every token, so steps are equal at their ends alone."""
    model = make_model()
    rope_patch.patch(model, "dynamic", growth=growth)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    apart = [
        (logits(native, n) - logits(model, n)).abs().max().item()
        for n in (SHORT, 2 * TRAINED, LONG)
    ]
    assert max(apart[:2]) < 1e-5
    assert (apart[2] < 1e-5) == (growth == "exact")
    assert sidecar(tmp_path)["native"] is (growth == "exact")
    assert ("grows with every token" in caplog.text) == (growth != "exact")
    assert logits(rope_patch.load(tmp_path)).equal(logits(model))
