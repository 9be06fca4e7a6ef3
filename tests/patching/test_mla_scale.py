"""Test that multi-head latent attention gets the attention factor once, in the softmax scale."""

import copy
import math

import pytest
import torch
from architectures.tiny_architectures import TRAINED, tiny_config, tiny_model
from helpers.releases import IGNORES_MSCALE, require_model
from transformers import AutoModelForCausalLM

import rope_patch

LONG = 150
ORIGIN = {"rope_theta": 1e4, "original_max_position_embeddings": TRAINED}
MSCALE = 0.1 * math.log(4) + 1


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 100, (1, LONG), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits


def plain(model_type):
    model = tiny_model(model_type)
    assert model.config.rope_parameters["rope_type"] == "default"
    return model


def native(model, **parameters):
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**model.config.rope_parameters, **ORIGIN, **parameters}
    other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
def test_yarn_matches_deepseeks_config(model_type):
    require_model(model_type)
    if model_type in IGNORES_MSCALE:
        pytest.skip("this release's own config has no mscale in the softmax")
    model = plain(model_type)
    expected = logits(native(model, rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0))
    scaled_twice = logits(native(model, rope_type="yarn", factor=4.0, attention_factor=MSCALE))
    handle = rope_patch.patch(model, "yarn", factor=4)
    assert handle.frequencies[None].attention_factor == 1
    assert handle.softmax_mscale == pytest.approx(MSCALE)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
    assert (logits(model) - scaled_twice).abs().max() > 1e-3
    assert "softmax scale" in handle.summary()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {}),
        ("yarn", {"mscale": 0.707, "mscale_all_dim": 0.9}),
        ("yarn", {"attention_factor": 1.5}),
        ("ntk-by-parts", {}),
        ("linear", {}),
        ("ntk", {}),
        ("longrope", {"long_factor": [1 + 0.3 * i for i in range(8)]}),
    ],
)
def test_patched_config_builds_the_same_model(method, options):
    model = plain("deepseek_v3")
    if method == "longrope":
        options = {**options, "short_factor": options["long_factor"]}
    rope_patch.patch(model, method, factor=4, **options)
    patched, parameters = logits(model), copy.deepcopy(model.config.rope_parameters)
    rope_patch.unpatch(model)
    torch.testing.assert_close(logits(native(model, **parameters)), patched, rtol=0, atol=1e-4)


def test_scale_from_the_config_is_replaced_and_restored():
    config = tiny_config("deepseek_v3")
    config.rope_parameters = {
        **config.rope_parameters,
        **ORIGIN,
        "original_max_position_embeddings": TRAINED // 4,
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    attention = model.model.layers[0].self_attn
    unscaled = attention.qk_head_dim**-0.5
    assert attention.scaling == pytest.approx(unscaled * MSCALE**2)
    with rope_patch.patch(model, "yarn", factor=8, start="unscaled"):  # from 16 tokens to 128
        assert attention.scaling == pytest.approx(unscaled * (0.1 * math.log(8) + 1) ** 2)
    with rope_patch.patch(model, "linear", factor=8, start="unscaled"):  # no attention factor
        assert attention.scaling == pytest.approx(unscaled)
    with rope_patch.patch(model, "yarn", factor=2):  # one YaRN from 16 tokens, 64 with the config's
        assert attention.scaling == pytest.approx(unscaled * (0.1 * math.log(8) + 1) ** 2)
    assert attention.scaling == pytest.approx(unscaled * MSCALE**2)
