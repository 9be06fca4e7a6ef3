"""Test the diagnosis of adapters, and of folders that rope_patch.save wrote."""

import json
import logging

import pytest
import torch
from helpers.tiny_models import TARGET, assert_differs, logits, make_model
from transformers import AutoModelForCausalLM

import rope_patch

peft = pytest.importorskip("peft")


@pytest.fixture
def base(tmp_path):
    make_model().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def make_adapted(base, patched):
    model = AutoModelForCausalLM.from_pretrained(base)
    if patched:
        rope_patch.patch(model, "linear", factor=4)
    torch.manual_seed(0)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def findings_by_code(diagnosis):
    return {finding.code: finding for finding in diagnosis.findings}


def test_adapter_without_a_sidecar(base, tmp_path):
    make_adapted(base, patched=False).save_pretrained(tmp_path / "adapter")
    diagnosis = rope_patch.diagnose(tmp_path / "adapter")
    finding = findings_by_code(diagnosis)["adapter-says-nothing"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert finding.severity == "warning"
    assert finding.numbers == {"fields": len(config), "about_rotation": 0}
    assert not any("rope" in key for key in config)
    assert base in finding.evidence


def test_adapter_trained_on_a_patched_base(base, tmp_path):
    trained = make_adapted(base, patched=True)
    rope_patch.save(trained, tmp_path / "adapter")
    unpatched = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    ).eval()
    assert_differs(logits(unpatched), logits(trained.eval()))
    finding = findings_by_code(rope_patch.diagnose(tmp_path / "adapter"))["adapter-trained-patched"]
    assert f"linear, 64 → {TARGET} tokens" in finding.evidence
    names = {"rope_patch": rope_patch}
    exec(finding.fix.split(", or ")[0], names)
    torch.testing.assert_close(logits(names["model"].eval()), logits(trained), rtol=0, atol=1e-5)


def test_adapter_on_another_base(base, tmp_path):
    rope_patch.save(make_adapted(base, patched=True), tmp_path / "adapter")
    other = make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    other.save_pretrained(base)
    finding = findings_by_code(rope_patch.diagnose(tmp_path / "adapter"))["adapter-on-another-base"]
    assert finding.severity == "error"
    assert "10000" in finding.evidence
    assert "500000" in finding.evidence


@pytest.mark.parametrize("patched", [False, True])
def test_live_adapter(base, patched):
    diagnosis = rope_patch.diagnose(make_adapted(base, patched))
    assert diagnosis.healthy
    assert findings_by_code(diagnosis)["adapter-says-nothing"].severity == "note"
    assert (diagnosis.patched is not None) == patched


def test_saved_folder_that_needs_rope_patch(tmp_path, caplog):
    for method, native in (("yarn", True), ("dynamic-yarn", False)):
        model = make_model()
        rope_patch.patch(model, method, length=TARGET)
        with caplog.at_level(logging.ERROR, "rope_patch"):
            rope_patch.save(model, tmp_path / method)
        diagnosis = rope_patch.diagnose(tmp_path / method)
        assert diagnosis.healthy == native
        assert ("needs-rope-patch" in findings_by_code(diagnosis)) != native


def test_damaged_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        rope_patch.diagnose(tmp_path)
