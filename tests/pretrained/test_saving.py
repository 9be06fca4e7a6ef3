"""Test that saved folders load in plain transformers, and that saving is all or nothing."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.method_names import position_maps
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
    forward,
    logits,
    make_config,
    make_model,
    tokens,
)
from transformers import AutoModelForCausalLM, modeling_rope_utils

import rope_patch

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


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in METHODS),
        *(("gemma3", method) for method in ("yarn", "longrope", "dynamic")),
        *(
            pytest.param("gemma3", method, marks=pytest.mark.slow)
            for method in METHODS
            if method not in ("yarn", "longrope", "dynamic")
        ),
    ],
)
def test_load_restores_the_patch_and_plain_transformers_the_rotation(family, method, tmp_path):
    plain = logits(make_model(family))
    model = save_patched(tmp_path, family, method, **METHODS[method])
    loaded = rope_patch.load(tmp_path)
    handle, saved_handle = rope_patch.current(loaded), rope_patch.current(model)
    assert handle.method == saved_handle.method
    assert (handle.trained_length, handle.length) == (TRAINED, saved_handle.length)
    for length in (SHORT, LONG):
        assert logits(loaded, length).equal(logits(model, length))
    assert_differs(logits(loaded), plain)
    handle.undo()
    assert logits(loaded).equal(plain)
    assert loaded.config.max_position_embeddings == TRAINED
    assert loaded.config.rope_parameters == make_config(family).rope_parameters

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


@pytest.mark.parametrize("when", ["first", "before", "midway"])
def test_failing_save_leaves_the_folder_unchanged(when, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    first_model = None if when == "first" else save_patched(folder)
    before = {path.name: path.read_bytes() for path in folder.glob("*")}
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
    assert {path.name: path.read_bytes() for path in folder.glob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"] * (when != "first")
    if first_model:
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
def test_temperature_of_nope_from_0_1_keeps_its_meaning(stored, temperature, tmp_path):
    """There a number was the coefficient of the logarithm, and growth an option of nope."""
    model = make_model()
    rope_patch.patch(model, "nope")
    rope_patch.save(model, tmp_path)
    record = sidecar(tmp_path)
    for name in {each.name for each in dataclasses.fields(rope_patch.Extension)} - {
        *("method", "trained_length", "layer_types", "length", "options")
    }:
        record.pop(name, None)
    record["options"] = {"factor": 1.0, "growth": "stepped", "temperature": stored}
    (tmp_path / "rope_patch.json").write_text(json.dumps(record))
    assert rope_patch.current(rope_patch.load(tmp_path)).method.temperature == temperature


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


# --- Position maps --------------------------------------------------------------------------------

OPTIONS = {
    "dpe": {"groups": [2, 4], "window": 9},
    "string": {"on": "yarn:4"},
    "rerope": {"window": 20, "temperature": "none"},
    "dca": {"on": "abf:2", "sizes": "released"},
    "jet-long": {"length": 512},
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "llama") for name in position_maps()),
        ("self-extend", "gemma3"),
        *(
            pytest.param(name, "gemma3", marks=pytest.mark.slow)
            for name in position_maps()
            if name != "self-extend"
        ),
    ],
)
def test_folders_load_to_the_same_logits(name, family, tmp_path):
    model, ids = make_model(family), tokens(LONG)
    plain = forward(model, ids)
    handle = rope_patch.patch(model, name, **OPTIONS.get(name, {}))
    expected = forward(model, ids)
    assert not torch.equal(expected, plain)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    assert torch.equal(forward(loaded, ids), expected)
    assert rope_patch.current(loaded).extension == handle.extension
    assert rope_patch.current(loaded).summary() == handle.summary()
    native = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(forward(native, ids), plain)
    assert json.loads((tmp_path / "rope_patch.json").read_text())["native"] is False


def test_no_config_names_a_map(tmp_path):
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_type"] = "rerope"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"rope_type must be one that transformers knows .* 'rerope'"
    ):
        rope_patch.load(tmp_path, "yarn", factor=2)


def test_extensions_ask_for_the_same_map():
    model, twin = make_model(), make_model()
    handle = rope_patch.patch(model, "self-extend", window=10, on="linear:2")
    again = rope_patch.Extension.from_dict(json.loads(json.dumps(handle.extension.to_dict())))
    rope_patch.patch(twin, again)
    assert torch.equal(forward(twin, tokens(LONG)), forward(model, tokens(LONG)))
