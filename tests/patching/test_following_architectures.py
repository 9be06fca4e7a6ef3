"""Frequencies that follow the sequence in other architectures: some are followed, some not."""

import pytest
import torch
import transformers
from tiny_models import (
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


def test_architectures_whose_keys_are_turned_otherwise():
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
def test_layers_that_may_not_rotate_are_not_guessed_at():
    config = transformers.AfmoeConfig(**small(), num_hidden_layers=2, head_dim=16)
    with torch.device("meta"):
        model = transformers.AfmoeForCausalLM(config)
    with pytest.raises(
        ValueError, match=r"rotates only if self\.is_local_attention: layers that do"
    ):
        rope_patch.patch(model, "dynamic-yarn")


def test_interleaved_pairs_are_followed():
    config = transformers.CohereConfig(**{**small(), "num_hidden_layers": 1})
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config).eval()
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(step_by_step(model, tokens(END), SHORT)[:, -1], forward(model, tokens(END))[:, -1])


def test_layers_without_rotation_are_left_alone():
    config = transformers.SmolLM3Config(
        **{**small(), "num_hidden_layers": 2, "no_rope_layers": [0, 1], "rope_parameters": None}
    )
    torch.manual_seed(0)
    model = transformers.SmolLM3ForCausalLM(config).eval()
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(tokens(SHORT), past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        step_by_step(model, tokens(LONG, seed=4), 1, cache)
    kept = [
        layer.keys[:, :, :SHORT].equal(was) for layer, was in zip(cache.layers, before, strict=True)
    ]
    assert kept == [True, False]


def small():
    """What a tiny model of any architecture needs."""
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
