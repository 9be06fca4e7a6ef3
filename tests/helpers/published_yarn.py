"""Make tiny models with the rotations of published checkpoints that were trained under YaRN."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers.rotary_modules import find_rotaries, softmax_mscales, transformers_frequencies
from helpers.tiny_models import BEFORE_5_17

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
# Published rotations: model type, max_position_embeddings, the YaRN, other fields.
PUBLISHED = {
    "gpt-oss": (
        "gpt_oss",
        131072,
        {
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000.0,
        },
        {"head_dim": 64},
    ),
    "Olmo 3": (
        "olmo3",
        65536,
        {
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
            "original_max_position_embeddings": 8192,
            "rope_theta": 5e5,
        },
        {"head_dim": 128, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Ministral 3": (
        "ministral3",
        262144,
        {
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1e6,
        },
        {"head_dim": 128},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        163840,
        {
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 1e4,
        },
        {
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
    "Laguna": (
        "laguna",
        262144,
        {
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
        },
        {"head_dim": 128, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
# Attention factor on cos and sin at four times the present length, by the paper's formula.
ATTENTION = {
    "gpt-oss": 1.4852030263919617,  # 0.1 ln 128 + 1
    "Olmo 3": 1.3465735902799727,  # 0.1 ln 32 + 1
    "Ministral 3": 1.0,
    "DeepSeek-V3": 1.0,
    "Laguna": 1.0,
}
# Those that dynamic methods follow: up to 5.10, latent attention caches its keys expanded.
FOLLOWED = [name for name in PUBLISHED if not (name == "DeepSeek-V3" and BEFORE_5_17)]
HAS_LAYER_TYPES = ("Olmo 3", "Laguna")


def make_config(name, length=None, **changes):
    model_type, published_length, yarn, fields = PUBLISHED[name]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"{model_type} is newer than this transformers")
    if name == "Olmo 3" and BEFORE_5_17:
        pytest.skip("its config has one rotation for all layer types in older releases")
    yarn = {"rope_type": "yarn", **yarn, **changes}
    rope = {"sliding_attention": dict(PLAIN), "full_attention": yarn}
    return CONFIG_MAPPING[model_type](
        **{
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_attention_heads_per_layer": [4, 4],
            "num_key_value_heads": 2,
            "kv_lora_rank": 16,
            "n_routed_experts": 4,
            "num_local_experts": 4,
            "num_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "shared_expert_intermediate_size": 16,
            "sliding_window": 16,
            "vocab_size": 128,
            "pad_token_id": 0,
            "max_position_embeddings": length or published_length,
            "rope_parameters": rope if name in HAS_LAYER_TYPES else yarn,
            **fields,
        }
    )


def make_model(name, **changes):
    torch.manual_seed(0)
    config = make_config(name, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def kind_of(name):
    return "full_attention" if name in HAS_LAYER_TYPES else None


def multiplied(name, factor, **changes):
    """Return transformers' frequencies for the config with its factor multiplied."""
    own = PUBLISHED[name][2]
    changes = {"factor": own["factor"] * factor, **changes}
    if name == "Olmo 3":
        changes["attention_factor"] = None
    model = make_model(name, **changes)
    (rotary,) = find_rotaries(model)
    text = model.config.get_text_config(decoder=True)
    return transformers_frequencies(rotary, text)[kind_of(name)], softmax_mscales(model)


def present_length(name):
    return PUBLISHED[name][1]


@torch.no_grad()
def logits(model, tokens=48, **kwargs):
    ids = torch.randint(4, 100, (1, tokens), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False, **kwargs).logits
