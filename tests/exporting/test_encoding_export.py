"""Test exports of models that do not rotate."""

import pytest
import torch
import transformers
from helpers.encoded_models import llama
from helpers.encoding_models import LENGTH, encoding_model, token_logits

import rope_patch
from rope_patch.exporting import ENGINES, export
from rope_patch.utils.errors import Refused


def test_a_saved_table_needs_its_folder_alone(tmp_path):
    model = encoding_model("GPT2LMHeadModel")
    rope_patch.patch(model, "linear", factor=4)
    with pytest.raises(Refused, match=r"stretched table is among the weights.*rope_patch\.save"):
        export(model, "vllm")
    rope_patch.save(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert export(config, "vllm").arguments == ["--max-model-len", str(4 * LENGTH)]
    assert export(config, "transformers").config == {}


@torch.no_grad()
def test_t5s_largest_distance_is_a_field_that_transformers_reads(tmp_path):
    model = encoding_model("T5ForConditionalGeneration")
    model.save_pretrained(tmp_path)
    rope_patch.patch(model, "max-distance", factor=4, trained_length=512)
    fields = export(model, "transformers").config
    plain = type(model).from_pretrained(tmp_path, **fields).eval()
    torch.testing.assert_close(token_logits(plain, 400), token_logits(model, 400))


@pytest.mark.parametrize(
    ("family", "method", "arguments"),
    [
        ("BloomForCausalLM", "ntk", {"trained_length": LENGTH}),
        ("XGLMForCausalLM", "linear", {}),
        ("T5ForConditionalGeneration", "log-tail", {"trained_length": LENGTH}),
        (
            "T5ForConditionalGeneration",
            "max-distance",
            {"trained_length": 512, "layer_types": ["decoder"]},
        ),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_no_config_says_is_refused(family, method, arguments, engine):
    model = encoding_model(family)
    rope_patch.patch(model, method, factor=4, **arguments)
    with pytest.raises(Refused, match=r"no config says other .* positions; serve the model with"):
        export(model, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted({*rope_patch.list_encodings()} - {"rope"}))
def test_no_engine_is_told_that_another_encoding_rotates(name, engine):
    model = llama()
    rope_patch.encode(model, name)
    with pytest.raises(Refused, match=rf"no form for the encoding '{name}'.*rope_patch\.load"):
        export(model, engine)


def test_an_encoded_rotation_is_in_the_config():
    model = llama()
    rope_patch.encode(model, "rope", base=500.0)
    assert export(model, "transformers").config["rope_parameters"]["rope_theta"] == 500
