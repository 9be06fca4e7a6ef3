"""Test which class reads a checkpoint, and that models with images are loaded whole."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.commands import run_in_this_process
from helpers.tiny_models import (
    TARGET,
    assert_differs,
    make_config,
)
from helpers.vision_models import MODEL_TYPES, SAMPLE, image_prompt, vision_config, vision_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import rope_patch
from rope_patch.pretrained import auto_class

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_models_with_images_are_read_whole(model_type):
    config = vision_config(model_type)
    assert auto_class(config) is AutoModelForImageTextToText
    text = config.get_text_config()
    if model_type.startswith("qwen3_5"):  # transformers has a class for the text alone
        assert auto_class(text) is AutoModelForCausalLM


@pytest.mark.parametrize("model_type", ["gemma3", "florence2", "qwen2_5_omni", "gpt2"])
def test_other_models_keep_the_causal_class(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    assert auto_class(config) is AutoModelForCausalLM
    assert auto_class(make_config()) is AutoModelForCausalLM
    assert auto_class(None) is AutoModelForCausalLM


@torch.no_grad()
def image_logits(model):
    # Longer than the trained length, in positions, too.
    return model(**image_prompt(20, 100), use_cache=False).logits


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
@pytest.mark.parametrize("model_type", SAMPLE)
def test_loading_and_saving_keep_the_images(model_type, method, tmp_path):
    model = vision_model(model_type)
    plain = image_logits(model)
    model.save_pretrained(tmp_path / "plain")
    loaded = rope_patch.load(tmp_path / "plain", method, length=TARGET)
    rope_patch.patch(model, method, length=TARGET)
    expected = image_logits(model)
    assert type(loaded) is type(model)
    assert torch.equal(image_logits(loaded), expected)
    assert_differs(expected, plain)
    rope_patch.save(loaded, tmp_path / "saved")
    assert torch.equal(image_logits(rope_patch.load(tmp_path / "saved")), expected)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_exports_say_where_the_whole_config_has_the_rotation(model_type, tmp_path):
    vision_model(model_type).save_pretrained(tmp_path)
    output = run_in_this_process(
        *("export", tmp_path, "--engine", "transformers", "--method", "yarn", "--factor", "4"),
        "--json",
    )
    assert output.returncode == 0, output.stderr
    exported = json.loads(output.stdout)["config"]
    assert list(exported) == ["text_config"]
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["text_config"].update(exported["text_config"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = vision_model(model_type)
    rope_patch.patch(model, "yarn", factor=4)
    native = AutoModelForImageTextToText.from_pretrained(tmp_path)
    torch.testing.assert_close(image_logits(native), image_logits(model), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("never_drawn")
def test_eval_measures_the_text_part(tmp_path):
    model = vision_model(SAMPLE[0], vocab_size=512, max_position_embeddings=256)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    result = run_in_this_process(
        *("eval", tmp_path, "--method", "none,dynamic-yarn", "--factor", "4", "--lengths", "512"),
        *("--depths", "50", "--samples", "2", "--tasks", "rp_niah_single_2"),
        *("--out", tmp_path / "out"),
    )
    assert result.returncode == 0, result.stderr
    assert f"patched {type(model).__name__}: dynamic-yarn, 256" in result.stderr
    assert (tmp_path / "out" / "report.html").exists()
