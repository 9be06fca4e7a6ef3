"""Test dynamic methods in other architectures: keys are re-rotated, or the patch is refused."""

import pytest
import torch
import transformers
from architectures.cached_rotation import assert_followed
from architectures.tiny_architectures import tiny_model
from helpers.releases import plain_transformers, require_model
from helpers.tiny_models import (
    BEFORE_5_17,
    BEFORE_5_23,
    LONG,
    OLD_TRANSFORMERS,
    SHORT,
    TRAINED,
    assert_close,
    forward,
    make_config,
    padded,
    step_by_step,
    tokens,
)
from transformers import DynamicCache
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import rope_patch

END = 300


@pytest.mark.skipif(not OLD_TRANSFORMERS, reason="newer releases cache the latent")
def test_expanded_latent_keys_are_refused():
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
        ValueError, match=r"caches its keys expanded.*cannot be followed in a cache yet"
    ):
        rope_patch.patch(model, "dynamic-yarn")
    assert rope_patch.current(model) is None


SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}


def test_several_thetas_in_one_layer_type_are_refused():
    require_model("granite_swa")
    model = tiny_model("granite_swa", layer_rope_theta=[1e4, 5e5])
    for method in ("linear", "dynamic-linear"):
        with pytest.raises(ValueError, match=r"theta 10000 and 500000 .*layer_rope_theta"):
            rope_patch.patch(model, method, factor=None if method.startswith("dynamic") else 2)


def test_thetas_of_layers_change_with_the_config(tmp_path):
    require_model("granite_swa")
    model = tiny_model("granite_swa", layer_rope_theta=[0, 1e4])
    rope_patch.patch(model, "abf", factor=2)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(forward(loaded, tokens(LONG)), forward(model, tokens(LONG)))


# One scaled attention each, so that only its keys depend on the length of the text.
ONE_ATTENTION = {
    "afmoe": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "cohere2_moe": {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["sparse"],
    },
    "beam": {"layer_types": ["full_attention", "sliding_attention"]},
    "falcon": {"num_hidden_layers": 1},
    "falcon_h1": {"num_hidden_layers": 1},
    "flint": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "gemma3n_text": {},
    "gemma4_text": {},
    "granite_swa": {"layer_rope_theta": [0, 1e4]},  # a rotary module that is not used, and one
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "kolibri1": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "moshi": {"num_hidden_layers": 1, "sliding_window": 512},  # a rotary module for each layer
    "olmo_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "gpt_neox": {"num_hidden_layers": 1},
    "phi": {"num_hidden_layers": 1},
    "glm4": {"num_hidden_layers": 1},
    "zaya": {"num_hidden_layers": 1, "layer_types": ["hybrid"]},
}


@pytest.mark.parametrize("model_type", ONE_ATTENTION)
def test_cached_keys_are_rerotated(model_type):
    require_model(model_type)
    if OLD_TRANSFORMERS and model_type in ("falcon_h1", "gemma3n_text", "granitemoehybrid"):
        pytest.skip("has a cache class of its own, or asks for a cache to rotate")
    model = tiny_model(model_type, **ONE_ATTENTION[model_type])
    with plain_transformers():  # some have caches of their own in old releases
        step_by_step(model, tokens(4), 3)
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


def test_keys_of_layers_that_run_several_times_are_rerotated():
    """Dory's loops cache the keys of each time in another layer of the cache."""
    require_model("dory")
    assert_followed(tiny_model("dory"), lambda handle, kind, inv_freq: inv_freq)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("nanochat", {}),
        ("llama4_text", {"no_rope_layers": [1], "use_qk_norm": True}),
        ("llama4_text", {"no_rope_layers": [1], "use_qk_norm": False}),
    ],
)
def test_norms_after_the_rotation_remove_the_attention_factor(model_type, changes):
    types = {"layer_types": ["full_attention"]} if model_type == "llama4_text" else {}
    model = tiny_model(model_type, num_hidden_layers=1, **types, **changes)
    rope_patch.patch(model, "dynamic-yarn")
    with torch.no_grad():
        decoded = step_by_step(model, tokens(END), SHORT)[:, -1]
    torch.testing.assert_close(decoded, forward(model, tokens(END))[:, -1], rtol=0, atol=2e-4)


def model_with_unexpanded_keys(model_type):
    if model_type == "deepseek_v2" and BEFORE_5_17:
        pytest.skip("transformers caches expanded keys")
    return tiny_model(model_type)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("method", "options"), [("dynamic-yarn", {}), ("mixed-yarn", {"factor": 4})]
)
@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v2", "cohere"])
def test_rows_of_a_batch_have_frequencies_of_their_own(model_type, method, options, side):
    """Rotate rows of different lengths together, by complex numbers in the first two."""
    model = model_with_unexpanded_keys(model_type)
    rope_patch.patch(model, method, trained_length=TRAINED, **options)
    rows = [tokens(length, seed=length) for length in (LONG, SHORT, TRAINED)]
    ids, mask = padded(rows, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = forward(model, ids, attention_mask=mask, position_ids=positions)
    for row, is_token, logits in zip(rows, mask.bool(), got, strict=True):
        torch.testing.assert_close(logits[is_token], forward(model, row)[0], rtol=0, atol=2e-4)


@pytest.mark.skipif(BEFORE_5_23, reason="its rotary modules take one set of frequencies")
@pytest.mark.parametrize("model_type", ["llama4_text", "deepseek_v2"])
def test_forwards_that_take_frequencies_per_row_stay(model_type):
    """Keep forwards of one complex tensor, too: its rows are not cos and sin."""
    model = tiny_model(model_type)
    rope_patch.patch(model, "dynamic-yarn")
    assert "forward" not in vars(model.model.rotary_emb)


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


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="fails on a second chunk without the patch, too")
def test_cached_keys_of_images_do_not_rotate():
    """Mllama caches the keys of cross-attention beside the others."""
    layers = {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = MllamaTextConfig(**{**small_config(), **layers, **rope})
    torch.manual_seed(0)
    model = transformers.MllamaForCausalLM(config).eval()
    states = torch.randn(1, 10, config.hidden_size)
    rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(tokens(SHORT), past_key_values=cache, cross_attention_states=states)
        before = [layer.keys.clone() for layer in cache.layers]
        model(tokens(LONG - SHORT, seed=4), past_key_values=cache)
    unchanged = [
        layer.keys[:, :, : keys.shape[2]].equal(keys)
        for layer, keys in zip(cache.layers, before, strict=True)
    ]
    assert unchanged == [False, True, False]


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
