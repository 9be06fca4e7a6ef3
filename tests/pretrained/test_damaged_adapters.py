"""Test that damaged adapters, and folders without one, raise errors that name the file."""

import shutil
from pathlib import Path

import pytest
from lora_adapters import assert_logits, assert_untouched, base, change, state

import rope_patch


def without_base(folder):
    change(folder, "adapter_config.json", base_model_name_or_path=None)
    change(folder, "rope_patch.json", base_model=None)
    return r"does not say on which model.*got None.*rope_patch\.load_adapter"


def missing_base(folder):
    change(folder, "adapter_config.json", base_model_name_or_path="/no/such/folder")
    return r"was trained on '/no/such/folder': no such folder.*rope_patch\.load_adapter"


def unknown_base(folder):
    change(folder, "adapter_config.json", base_model_name_or_path="nobody/nothing")
    return r"was trained on 'nobody/nothing': cannot load.*rope_patch\.load_adapter"


def empty_base(folder):
    (folder.parent / "empty").mkdir()
    change(folder, "adapter_config.json", base_model_name_or_path=str(folder.parent / "empty"))
    return r"was trained on '.*empty': .*holds no config\.json"


def cut_config(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": ')
    return r"adapter_config\.json is damaged"


def no_weights(folder):
    (folder / "adapter_model.safetensors").unlink()
    return r"holds no adapter_model\.safetensors"


def cut_weights(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return r"adapter_model\.safetensors is cut short or damaged"


def cut_sidecar(folder):
    (folder / "rope_patch.json").write_text("{")
    return r"rope_patch\.json is damaged"


def no_frequencies(folder):
    change(folder, "rope_patch.json", frequencies={"all": {}})
    return "frequencies in rope_patch.json are damaged"


def method_of_tomorrow(folder):
    change(folder, "rope_patch.json", method="tomorrow")
    return "unknown method 'tomorrow'"


DAMAGES = [
    without_base,
    missing_base,
    unknown_base,
    empty_base,
    cut_config,
    no_weights,
    cut_weights,
    cut_sidecar,
    no_frequencies,
    method_of_tomorrow,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_adapter_error_names_the_damage(bases, saved_adapter, tmp_path, damage):
    folder = Path(shutil.copytree(saved_adapter("yarn")[0], tmp_path / "adapter"))
    message = damage(folder)
    with pytest.raises(ValueError, match=message):
        rope_patch.load(folder)
    if damage in (without_base, missing_base, unknown_base, empty_base):
        got = rope_patch.load_adapter(base(bases), folder)
        assert_logits(got, saved_adapter("yarn")[1])
    elif damage is not cut_config:
        model = base(bases)
        before = state(model)
        with pytest.raises(ValueError, match=message):
            rope_patch.load_adapter(model, folder)
        assert_untouched(model, before)


def test_folders_without_an_adapter_are_refused(bases, tmp_path):
    with pytest.raises(ValueError, match=r"no such folder.*snapshot_download"):
        rope_patch.load_adapter(base(bases), "somebody/adapter")
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json.*found nothing"):
        rope_patch.load_adapter(base(bases), tmp_path)
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json.*found config\.json"):
        rope_patch.load_adapter(base(bases), bases / "llama")
    with pytest.raises(TypeError, match="expected a transformers model"):
        rope_patch.load_adapter("llama", tmp_path)
