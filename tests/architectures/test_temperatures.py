"""Test temperatures in many architectures: a constant one is a larger softmax scale."""

import pytest
import torch
import transformers
from helpers.tiny_models import OLD_TRANSFORMERS
from tiny_architectures import tiny_model
from transformers import CONFIG_MAPPING

import rope_patch
from rope_patch.patching.query_temperature import find_scalable_attentions

ARCHITECTURES = [
    "apertus",
    "cohere",
    "deepseek_v2",
    "deepseek_v32",
    "falcon_h1",
    "gemma3n_text",
    "glm4",
    "gpt_oss",
    "lfm2",
    "minicpm3",
    "mllama",
    "olmo2",
    "persimmon",
    "qwen3_next",
    "smollm3",
    "zamba2",
]

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has fewer architectures")


@torch.no_grad()
def logits(model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (1, 40), generator=generator)
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_constant_temperature_is_a_larger_softmax_scale(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this release has no such model")
    model = tiny_model(model_type).eval()
    plain = logits(model)
    handle = rope_patch.patch(model, "linear", factor=2, temperature=3.0)
    got = logits(model)
    handle.undo()
    assert logits(model).equal(plain)
    rope_patch.patch(model, "linear", factor=2)
    without = logits(model)
    config = rope_patch.current(model).original_config
    for module in model.modules():
        if getattr(module, "scaling", None) and getattr(module, "is_causal", True):
            if "cross" in type(module).__name__.lower() or "Vision" in type(module).__name__:
                continue
            kinds = getattr(config, "layer_types", None)
            extended = rope_patch.current(model).geometries
            if None in extended or kinds[module.layer_idx] in extended:
                module.scaling *= 3
    torch.testing.assert_close(got, logits(model), rtol=0, atol=1e-4)
    assert (got - without).abs().max() > 1e-3


def test_layer_types_without_attentions_are_refused():
    model = tiny_model("deepseek_v4")
    with pytest.raises(rope_patch.Refused, match="which of its attentions belong to"):
        rope_patch.patch(model, "linear", factor=2, temperature=3.0)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_5_text"])
def test_several_positions_are_refused(model_type):
    model = tiny_model(model_type)
    with pytest.raises(rope_patch.Refused, match=r"several positions \(M-RoPE\)"):
        rope_patch.patch(model, "linear", factor=2, temperature=3.0)


def test_temperature_of_mistral_4_is_refused():
    with pytest.raises(rope_patch.Refused, match="Mistral4Config has a temperature of its own"):
        find_scalable_attentions([], transformers.Mistral4Config(), {})
