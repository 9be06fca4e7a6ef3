"""Test position maps through save, load, and what plain transformers makes of the folder."""

import json

import pytest
import torch
from helpers.method_names import position_maps
from helpers.tiny_models import LONG, forward, make_model, tokens
from transformers import AutoModelForCausalLM

import rope_patch

OPTIONS = {
    "dpe": {"groups": [2, 4], "window": 9},
    "string": {"on": "yarn:4"},
    "rerope": {"window": 20, "temperature": "none"},
    "dca": {"on": "abf:2", "sizes": "released"},
    "jet-long": {"length": 512},
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", position_maps())
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
