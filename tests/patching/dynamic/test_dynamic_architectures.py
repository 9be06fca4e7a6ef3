"""Test dynamic methods in other architectures: keys are re-rotated, or the patch is refused."""

import pytest
import torch
import transformers
from architectures.tiny_architectures import tiny_model
from helpers.tiny_models import (
    LONG,
    OLD_TRANSFORMERS,
    SHORT,
    TRAINED,
    assert_close,
    forward,
    make_config,
    step_by_step,
    tokens,
)
from transformers import DynamicCache

import rope_patch

END = 300


def test_compressed_keys_are_refused():
    shape = {
        **{k: v for k, v in make_config().to_dict().items() if k in SIZES},
        "moe_layer_freq": 1,
    }
    config = transformers.DeepseekV3Config(
        **shape, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, kv_lora_rank=16
    )
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    with pytest.raises(
        ValueError, match=r"compressed keys.*cannot be followed in a cache yet: use a method"
    ):
        rope_patch.patch(model, "dynamic-yarn")
    assert rope_patch.current(model) is None


SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="has no such model")
def test_conditionally_rotating_layers_are_refused():
    model = tiny_model("granite_swa")
    with pytest.raises(
        ValueError, match=r"rotates only if position_embeddings is not None: layers that do"
    ):
        rope_patch.patch(model, "dynamic-yarn")


# One scaled attention each, so that only its keys depend on the length of the text.
ONE_ATTENTION = {
    "afmoe": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "cohere2_moe": {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["sparse"],
    },
    "falcon": {"num_hidden_layers": 1},
    "flint": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "gemma3n_text": {},
    "gemma4_text": {},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "kolibri1": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "olmo_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "gpt_neox": {"num_hidden_layers": 1},
    "phi": {"num_hidden_layers": 1},
    "glm4": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("model_type", ONE_ATTENTION)
def test_cached_keys_are_rerotated(model_type):
    model = tiny_model(model_type, **ONE_ATTENTION[model_type])
    windows = set(getattr(model.config, "layer_types", [])) == {"sliding_attention"}
    kinds = ["sliding_attention"] if windows and len(by_layer_type(model)) > 1 else None
    handle = rope_patch.patch(model, "dynamic-linear", layer_types=kinds)
    assert handle.method.is_length_dependent(TRAINED)
    ids = tokens(END)
    with torch.no_grad():
        decoded = step_by_step(model, ids, SHORT)[:, -1]
    torch.testing.assert_close(decoded, forward(model, ids)[:, -1], rtol=0, atol=2e-4)
    rope_patch.unpatch(model)
    plain = forward(model, ids)[:, -1]
    assert (decoded - plain).abs().max() > 1e-3


def by_layer_type(model):
    return rope_patch.rope_config.by_layer_type(model.config.rope_parameters)


def test_interleaved_pairs_are_rerotated():
    config = transformers.CohereConfig(**{**small_config(), "num_hidden_layers": 1})
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config).eval()
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(step_by_step(model, tokens(END), SHORT)[:, -1], forward(model, tokens(END))[:, -1])


def test_layers_without_rotation_keep_their_keys():
    config = transformers.SmolLM3Config(
        **{
            **small_config(),
            "num_hidden_layers": 2,
            "no_rope_layers": [0, 1],
            "rope_parameters": None,
        }
    )
    torch.manual_seed(0)
    model = transformers.SmolLM3ForCausalLM(config).eval()
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(tokens(SHORT), past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        step_by_step(model, tokens(LONG, seed=4), 1, cache)
    unchanged = [
        layer.keys[:, :, :SHORT].equal(keys)
        for layer, keys in zip(cache.layers, before, strict=True)
    ]
    assert unchanged == [True, False]


def small_config():
    """Return the size fields of a tiny model of any architecture."""
    return {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TRAINED,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
