"""Test that folders of methods from outside load without them, and say so."""

import json

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.plugins import write_method
from helpers.published_yarn import PUBLISHED
from helpers.published_yarn import logits as logits_of_published
from helpers.published_yarn import make_model as make_published
from helpers.tiny_models import (
    LONG,
    OLD_TRANSFORMERS,
    assert_close,
    assert_differs,
    logits,
    make_model,
)
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.methods import load_plugin, registry
from rope_patch.utils import plugins

pytestmark = pytest.mark.usefixtures("own_registry")
FAMILIES = ["llama", "qwen3", "gemma3", "phi3"]


@pytest.fixture
def forget(monkeypatch):
    """Return a function that forgets the method `outside`, as in another process."""

    def forget():
        registry._REGISTRY.pop("outside", None)
        monkeypatch.setenv(plugins.VARIABLE, "")

    return forget


def save_patched(model, folder, **changes):
    """Patch a model by a method from a file, and save it; return the handle."""
    path = write_method(folder.parent / "mine.py", **changes)
    load_plugin(str(path))
    handle = rope_patch.patch(model, "outside", factor=4)
    rope_patch.save(model, folder)
    return handle


def sidecar_of(folder):
    return json.loads((folder / "rope_patch.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention_factor", ["1.0", "1.2"])
def test_folders_load_without_the_plugin(family, attention_factor, tmp_path, forget, caplog):
    model = make_model(family)
    plain = logits(model)
    save_patched(model, tmp_path / "saved", attention_factor=attention_factor)
    expected = logits(model)
    assert_differs(expected, plain)
    assert sidecar_of(tmp_path / "saved")["native"]
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()), expected)
    assert_close(logits(rope_patch.load(tmp_path / "saved")), expected)
    forget()
    caplog.clear()
    loaded = rope_patch.load(tmp_path / "saved")
    assert torch.equal(logits(loaded), expected)
    assert "'outside' of the file mine.py is not loaded here" in caplog.text
    summary = rope_patch.current(loaded).summary()
    assert summary.startswith("outside (recorded) ×4, 64 → 256 tokens")
    assert "a method from outside: the file mine.py" in summary
    rope_patch.save(loaded, tmp_path / "again")
    assert torch.equal(logits(rope_patch.load(tmp_path / "again")), expected)
    for subject in (tmp_path / "saved", tmp_path / "again", loaded):
        findings = {each.code: each for each in rope_patch.diagnose(subject).findings}
        assert "the file mine.py" in findings["method-from-outside"].evidence


@torch.no_grad()
@pytest.mark.parametrize("attention_factor", ["1.0", "1.2"])
def test_latent_attention_keeps_its_softmax_scale(attention_factor, tmp_path, forget):
    model = tiny_model("deepseek_v3")
    ids = torch.randint(4, 100, (1, LONG), generator=torch.Generator().manual_seed(1))
    handle = save_patched(model, tmp_path / "saved", attention_factor=attention_factor)
    assert handle.softmax_mscale == float(attention_factor)
    expected = model(input_ids=ids, use_cache=False).logits
    forget()
    loaded = rope_patch.load(tmp_path / "saved")
    assert rope_patch.current(loaded).softmax_mscale == float(attention_factor)
    torch.testing.assert_close(loaded(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs nested YaRN and new model types")
@pytest.mark.parametrize("name", PUBLISHED)
def test_models_with_a_yarn_of_their_own_keep_both(name, tmp_path, forget):
    model = make_published(name)
    handle = save_patched(model, tmp_path / "saved", attention_factor="1.1")
    assert handle.extension.start == "running"
    expected = logits_of_published(model)
    forget()
    loaded = rope_patch.load(tmp_path / "saved", attn_implementation="eager")
    assert torch.equal(logits_of_published(loaded), expected)


def test_adapters_load_without_the_plugin(tmp_path, forget, caplog):
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval()
    save_patched(model, tmp_path / "adapter")
    expected = logits(model)
    forget()
    caplog.clear()
    assert_close(logits(rope_patch.load(tmp_path / "adapter")), expected)
    assert "'outside' of the file mine.py is not loaded here" in caplog.text
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_close(logits(rope_patch.load_adapter(plain, tmp_path / "adapter")), expected)


def test_the_sidecar_names_file_and_digest(tmp_path):
    save_patched(make_model(), tmp_path / "saved")
    outside = sidecar_of(tmp_path / "saved")["outside"]
    assert (outside["package"], outside["file"]) == (None, "mine.py")
    assert len(outside["digest"]) == 16
    rope_patch.save(rope_patch.load(tmp_path / "saved", "yarn", factor=2), tmp_path / "yarn")
    assert "outside" not in sidecar_of(tmp_path / "yarn")


def test_another_computation_under_the_same_name_is_refused(tmp_path, forget):
    model = make_model()
    save_patched(model, tmp_path / "saved")
    expected = logits(model)
    forget()
    load_plugin(str(write_method(tmp_path / "mine.py", divisor="9")))
    with pytest.raises(rope_patch.Refused, match="computes other frequencies here than 'outside'"):
        rope_patch.load(tmp_path / "saved")
    named = rope_patch.load(tmp_path / "saved", "outside", factor=4)
    assert_differs(logits(named), expected)


LENGTHS = "self.factor if seq_len is None or seq_len > geometry.trained_length else 1"


def test_a_method_that_follows_the_length_needs_its_plugin(tmp_path, forget, caplog):
    model = make_model()
    handle = save_patched(model, tmp_path / "saved", divisor=f"({LENGTHS})", following=True)
    assert handle.is_length_dependent
    assert "load this folder with rope_patch.load" in caplog.text
    assert not sidecar_of(tmp_path / "saved")["native"]
    for length in (40, LONG):
        reloaded = rope_patch.load(tmp_path / "saved")
        assert torch.equal(logits(reloaded, length), logits(model, length))
    forget()
    message = "'outside' of the file mine.py, which is not loaded here and follows the length"
    with pytest.raises(rope_patch.Refused, match=message):
        rope_patch.load(tmp_path / "saved")


@pytest.mark.parametrize("damage", [{"follows_length": False}, {"start_tokens": "many"}])
def test_a_damaged_record_is_refused(tmp_path, forget, damage):
    save_patched(make_model(), tmp_path / "saved")
    forget()
    sidecar = sidecar_of(tmp_path / "saved")
    sidecar["outside"] = damage
    (tmp_path / "saved" / "rope_patch.json").write_text(json.dumps(sidecar))
    with pytest.raises(rope_patch.Refused, match=r"rope_patch\.json is damaged \(outside: "):
        rope_patch.load(tmp_path / "saved")
