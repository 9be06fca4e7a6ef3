"""Test that adapters record the rotation of their training, and load onto no other."""

import json
import logging
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from helpers.lora_adapters import (
    METHODS,
    add_adapter,
    assert_logits,
    assert_untouched,
    base,
    change,
    lora,
    state,
)
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
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import rope_patch

peft = pytest.importorskip("peft")

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"


QUICK = ("yarn", "dynamic-yarn", "mixed-yarn", "longrope", "rerope")  # the others are alike


@pytest.mark.parametrize(
    ("method", "family", "first"),
    [
        *(
            pytest.param(m, "llama", "patch", marks=() if m in QUICK else pytest.mark.slow)
            for m in METHODS
        ),
        ("longrope", "gemma3", "patch"),
        *(
            pytest.param(m, "gemma3", "patch", marks=pytest.mark.slow)
            for m in ("yarn", "dynamic", "rerope")
        ),
        ("yarn", "llama", "adapter"),
        ("dynamic", "gemma3", "adapter"),
    ],
)
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
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n")  # PEFT's, whose header the Hub reads
    rope_patch.save(rope_patch.load(folder), folder)  # the line stays one line
    lines = [line for line in (folder / "README.md").read_text().splitlines() if "yarn" in line]
    assert len(lines) == 1
    assert "rope_patch.load" in lines[0]


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
    before = state(model)
    with pytest.raises(ValueError, match=r"(?s)was trained on a base.*unpatch") as error:
        rope_patch.load_adapter(model, folder)
    assert str(error.value).count(" → ") == 2  # shows both patches
    assert str(handle) in str(error.value)
    assert_untouched(model, before)


def test_an_adapter_loads_once_the_refused_patch_is_undone(bases, saved_adapter):
    folder, (_, long) = saved_adapter("yarn")
    model = base(bases)
    handle = rope_patch.patch(model, "linear", factor=4)
    expected = logits(model)
    with pytest.raises(ValueError, match="was trained on a base"):
        rope_patch.load_adapter(model, folder)
    assert logits(model).equal(expected)
    handle.undo()
    assert logits(model).equal(logits(base(bases)))
    assert logits(rope_patch.load_adapter(model, folder)).equal(long)


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


NATIVE_BASES = {  # the adapter's method and options; the method of the base's config; the patch
    "linear": ("linear", {}, "linear", None),
    "yarn": ("yarn", {}, "yarn", None),
    "ntk": ("ntk", {}, "ntk", None),
    # The frequencies are equal at one length only, or not all that the method does.
    "at one length": ("dynamic-yarn", {"length": 4 * TRAINED}, "yarn:plain", "dynamic-yarn"),
    "temperature": ("yarn", {"temperature": "log-n"}, "yarn", "yarn"),
    "map": ("rerope", {"on": "yarn:4"}, "yarn:plain", "rerope"),
}


@pytest.mark.parametrize("case", NATIVE_BASES)
def test_base_whose_config_has_the_rotation_is_patched_with_what_no_config_says(
    bases, saved_adapter, case, tmp_path
):
    method, options, stated, patched_with = NATIVE_BASES[case]
    folder, expected = saved_adapter(method, **options)
    model = base(bases)
    name, _, plain = stated.partition(":")
    rope_patch.patch(model, name, **({"factor": 4} if plain else METHODS[name]))
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = rope_patch.load_adapter(native, folder)
    handle = rope_patch.current(got)
    assert (handle and handle.method.name) == patched_with
    lengths = (SHORT, LONG) if case == "at one length" else (LONG,)
    for length in lengths:
        assert_close(logits(got, length), expected[(SHORT, LONG).index(length)])


OTHER_BASES = {
    "base": ("yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "500000"),
    "heads": ("yarn", {"head_dim": 32}, "would rotate LlamaForCausalLM otherwise"),
    "layer types": ("linear gemma3", {}, "rotates all layers alike"),
    "size": ("yarn", {"num_attention_heads": 8}, r"does not fit.*size mismatch.*/llama"),
}


@pytest.mark.parametrize("case", OTHER_BASES)
def test_base_with_another_rotation_or_size_is_refused(saved_adapter, case):
    adapter, sizes, named = OTHER_BASES[case]
    folder, _ = saved_adapter(*adapter.split())
    model = make_model(**sizes)
    before, expected = state(model), logits(model)
    with pytest.raises(ValueError, match=named):
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
    with pytest.raises(ValueError, match=r"peft is not installed.*'\.\[train\]'"):
        rope_patch.load_adapter(model, folder)
    assert_untouched(model, before)


def test_load_adapter_emits_no_peft_warnings(bases, saved_adapter):
    folder, _ = saved_adapter("yarn")
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        rope_patch.load_adapter(base(bases), folder)
    assert not [warning for warning in caught_warnings if "adapter" in str(warning.message).lower()]


# --- Loading with a base --------------------------------------------------------------------------


def test_load_adapter_of_a_base_saved_with_a_patch(bases, tmp_path):
    first = base(bases)
    rope_patch.patch(first, "yarn", factor=4)
    rope_patch.save(first, tmp_path / "base")
    model = add_adapter(rope_patch.load(tmp_path / "base"))
    rope_patch.save(model, tmp_path / "recorded")
    model.save_pretrained(tmp_path / "without_sidecar")
    expected = logits(model)
    for name in ("recorded", "without_sidecar"):
        loaded = rope_patch.load(tmp_path / name)
        assert logits(loaded).equal(expected)
        assert rope_patch.current(loaded).original["max_position_embeddings"] == TRAINED


def test_load_adapter_with_a_method(saved_adapter):
    folder, expected = saved_adapter("yarn")
    assert_logits(rope_patch.load(folder, "yarn", factor=4, beta_fast=16), expected)
    with pytest.raises(ValueError, match=r"was trained on a base.*yarn ×4.*linear ×4"):
        rope_patch.load(folder, "linear", factor=4)
    with pytest.raises(ValueError, match="factor goes with a method"):
        rope_patch.load(folder, factor=4)


def test_failing_requests_read_no_weights(saved_adapter, bases, monkeypatch):
    folder, _ = saved_adapter("yarn")
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read")
    )
    with pytest.raises(ValueError, match="was trained on a base"):
        rope_patch.load(folder, "linear", factor=4)


def test_load_passes_arguments_for_base_and_adapter(saved_adapter):
    folder, _ = saved_adapter("yarn")
    loaded = rope_patch.load(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        kernels="hf",
        is_trainable=True,
        adapter_name="mine",
    )
    assert loaded.active_adapter == "mine"
    assert loaded.get_base_model().model.layers[0].self_attn.k_proj.weight.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    assert any(p.requires_grad for p in loaded.parameters())
    assert "transformers' own" in rope_patch.current(loaded).summary()


def test_load_uses_the_base_revision_of_the_adapter(saved_adapter, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(saved_adapter("yarn")[0], tmp_path / "adapter"))
    change(folder, "adapter_config.json", revision="v2")
    revisions = []
    for kind in (transformers.AutoConfig, transformers.AutoModelForCausalLM):

        def read(path, *args, original=kind.from_pretrained, **kwargs):
            revisions.append(kwargs["revision"])
            return original(path, *args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", read)
    assert_logits(rope_patch.load(folder), saved_adapter("yarn")[1])
    assert revisions[:2] == ["v2", "v2"]
    rope_patch.load(folder, revision="v3")
    assert revisions[-1] == "v3"


def test_several_adapters_on_one_model(bases, saved_adapter):
    folder, expected = saved_adapter("yarn")
    model = rope_patch.load_adapter(base(bases), folder)
    with pytest.raises(ValueError, match=r"expected a new name.*'default'.*adapter_name="):
        rope_patch.load_adapter(model, folder)
    assert rope_patch.load_adapter(model, folder, adapter_name="again") is model
    model.set_adapter("again")
    assert_logits(model, expected)
    before = state(model)
    with pytest.raises(ValueError, match="was trained on a base"):
        rope_patch.load_adapter(model, saved_adapter("linear")[0], adapter_name="other")
    assert_untouched(model, before)


def test_each_named_adapter_gets_a_sidecar(bases, tmp_path):
    model = base(bases)
    rope_patch.patch(model, "yarn", factor=4)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, lora(), adapter_name="one").eval()
    model.add_adapter("two", lora(r=4))
    rope_patch.save(model, tmp_path)
    for name in ("one", "two"):
        assert "rope_patch.load" in (tmp_path / name / "README.md").read_text()
        model.set_adapter(name)
        got = rope_patch.load_adapter(base(bases), tmp_path / name)
        assert rope_patch.current(got).method.name == "yarn"
        assert logits(got).equal(logits(model))


@pytest.mark.skipif(
    Version(version("peft")) < Version(MIN_PEFT_VERSION),
    reason=f"this transformers adds adapters with PEFT {MIN_PEFT_VERSION} alone",
)
def test_adapter_added_by_transformers(bases, saved_adapter, tmp_path):
    """Use `model.add_adapter`, which makes no PeftModel."""
    model = base(bases)
    rope_patch.patch(model, "yarn", factor=4)
    torch.manual_seed(0)
    model.add_adapter(lora())
    rope_patch.save(model, tmp_path)
    got = rope_patch.load(tmp_path)
    assert rope_patch.current(got).method.name == "yarn"
    assert_close(logits(got), logits(model.eval()))


def test_base_works_without_the_adapter(bases, saved_adapter):
    folder, _ = saved_adapter("yarn")
    model = base(bases)
    plain = logits(model)
    got = rope_patch.load_adapter(model, folder)
    rope_patch.patch(patched := base(bases), "yarn", factor=4, beta_fast=16)
    with got.disable_adapter():
        assert logits(got).equal(logits(patched))
    unloaded = got.unload()
    assert logits(unloaded).equal(logits(patched))
    rope_patch.unpatch(unloaded)
    assert logits(unloaded).equal(plain)


def test_adapter_on_an_offloaded_base(bases, saved_adapter, tmp_path, monkeypatch):
    folder, expected = saved_adapter("yarn")
    monkeypatch.chdir(tmp_path)  # PEFT writes changed offloaded weights into the current folder
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    rest = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = rope_patch.load(
        folder, device_map={**device_map, **rest}, offload_folder=tmp_path / "offload"
    )
    assert rope_patch.current(loaded).method.name == "yarn"
    assert_close(logits(loaded), expected[1])
