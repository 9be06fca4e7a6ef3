"""Make tiny random checkpoints of the families in docs/engines.md, and say what is asked of them.

A case has the name of a row of that table. Names of architectures are those of the text models.
"""

from tiny_checkpoints import Case, make_config

_HYBRID = {
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 32},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "moe_intermediate_size": 64},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "first_k_dense_replace": 1,
}
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_LATENT_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}


def _qwen3_5():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    layers = ["linear_attention", "full_attention"] * 2
    fields = {**_HYBRID, "head_dim": 64, "layer_types": layers, "num_hidden_layers": 4}
    return make_config("Qwen3_5Text", 256, rope, full_attention_interval=2, **fields)


def _kimi():
    yarn = {**_LATENT_YARN, "rope_theta": 5e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 64
    return make_config("DeepseekV3", 256, yarn, **_LATENT)


def _glm5():
    fields = {**_LATENT, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 2048}
    # Published, and read by mlx-lm.
    fields |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return make_config("GlmMoeDsa", 256, rope, **fields)


def _gemma4():
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            **{"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    }
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    sizes = {"head_dim": 32, "global_head_dim": 64, "num_hidden_layers": 6, "sliding_window": 64}
    sizes |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 256}
    return make_config("Gemma4Text", 256, rope, layer_types=layers, **sizes)


def _ministral3():
    rope = {**_LATENT_YARN, "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 64
    return make_config("Ministral3", 256, rope, head_dim=32)


def _deepseek_v4():
    yarn = {**_YARN, "factor": 4.0, "original_max_position_embeddings": 64}
    layers = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    sizes = {"head_dim": 64, "partial_rotary_factor": 0.5, "q_lora_rank": 64, "o_lora_rank": 64}
    sizes |= {"o_groups": 2, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 512}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 3, "layer_types": layers}
    sizes |= {"mlp_layer_types": ["moe"] * 3, "num_nextn_predict_layers": 0}
    return make_config("DeepseekV4", 256, yarn, **sizes)


# Fields of the published config.json that transformers 5 does not save.
PUBLISHED_FIELDS = {
    "Gemma 4": {"global_head_dim": 64},
    "DeepSeek-V4": {"compress_ratios": [0, 4, 128], "qk_rope_head_dim": 32},
}
FAMILY_CONFIGS = {
    "Qwen3.5, Qwen3.8": _qwen3_5,
    "Kimi K2.5": _kimi,
    "GLM-5": _glm5,
    "Gemma 4": _gemma4,
    "Ministral 3": _ministral3,
    "DeepSeek-V4": _deepseek_v4,
}
_ASKED = {
    "own": {},
    "yarn": {"method": "yarn", "factor": 2},
    "linear": {"method": "linear", "factor": 2},
    "ntk": {"method": "ntk", "factor": 2},
}
FAMILY_CASES = {
    f"{family}, {asked}": Case.of(family, **request)
    for family in FAMILY_CONFIGS
    for asked, request in _ASKED.items()
}
FAMILY_CASES |= {
    "gpt-oss, own": Case.of("gpt-oss"),
    "gpt-oss, yarn": Case.of("gpt-oss", "yarn", factor=2, tokens=320),
}
