"""Test loading of adapters with their bases: arguments, revisions, names, offloading."""

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_models import (
    TRAINED,
    assert_close,
    logits,
)
from lora_adapters import (
    add_adapter,
    assert_logits,
    assert_untouched,
    base,
    change,
    lora,
    peft,
    state,
)
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import rope_patch


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
