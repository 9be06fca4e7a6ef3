"""Make tiny random models of every architecture of transformers that generates text and rotates.

The default config of each is shrunk field by field, by name. A new architecture needs an entry
here only if its sizes depend on each other.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

TRAINED = 64
HEAD_DIM = 16

# The first rule that matches a field's name gives its size.
_SIZES: list[tuple[str, int]] = [
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"(token_id|token_index)$", 3),
    (r"vocab_size", 128),
    (r"(max_position_embeddings|n_positions|max_seq_len|model_max_length)$", TRAINED),
    (r"sliding_window|attention_window|attention_chunk_size|window_size", 32),
    (r"(num_key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads)$", 2),
    (r"(mamba|linear|conv|ssm|time).*(n_heads|num.*heads)|mamba_n_heads|n_mamba_heads", 8),
    (r"(num.*heads|n_heads?|num_head|n_head)$", 4),
    (r"(num_experts_per_tok|top_k|topk|moe_topk|num_experts_per_token)$", 2),
    (r"(n_group|topk_group|n_groups|num_groups|mamba_n_groups|expert_groups?)$", 1),
    (r"(n_shared_experts|num_shared_experts)$", 1),
    (r"(num.*experts|n_routed_experts|moe_num_experts|num_local_experts|zero_expert_num)$", 4),
    (r"(first_k_dense_replace|num_dense_layers|num_kv_shared_layers|moe_layer_start_index)$", 1),
    (r"(num_nextn_predict_layers|mtp.*layers)$", 0),
    (r"(num.*layers|n_layers?|num_blocks)$", 2),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"(head_dim|head_size|lora_rank|rope_head_dim|kv_channels|index_head_dim)", HEAD_DIM),
    (r"(hidden_size_per_layer_input|embed_dim_per)", 16),
    (r"(hidden_size|d_model|n_embd|hidden_dim|dim|embedding_size|projection_dim)$", 64),
    (r"(intermediate|ffn|n_inner|d_ff|width|lru_width|expert_size|hidden_size)", 64),
    (r"(chunk_size|mamba_chunk_size)$", 16),
    (r"(d_state|state_size|ssm_state)", 16),
]
_UNCHANGED = re.compile(
    r"(expand|d_conv|conv_kernel|kernel_size|interval|step|period|pattern|version|freq|stride|"
    r"multiplier|layer_ids?|offset|cap|scale|factor|group_size)"
)

# Sizes that do not follow from the names of fields.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}  # together twice the hidden size
_HEADS = {"head_dim": HEAD_DIM, "num_key_value_heads": 2}
_NEMOTRON = {"num_attention_heads": 4, **_HEADS}
_WIDE_LATENT = {  # of layers with a window
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": HEAD_DIM},
    **{"q_lora_rank": HEAD_DIM, "kv_lora_rank": HEAD_DIM},
    **{"head_dim": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": HEAD_DIM},
}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": HEAD_DIM},
    "gptj": {"rotary_dim": HEAD_DIM},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dory": {
        **{"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "dots3_note_text": {"per_layer_config": {1: _WIDE_LATENT}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": [64, 64]},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},  # 8 slots in the cache
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": _HEADS,
    "nemotron": _NEMOTRON,
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "attention"]},
    "zamba2": {
        "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "use_mem_rope": True,
        "attention_hidden_size": 128,  # attention reads the hidden state and the embedding
        "attention_head_dim": 32,
        "mamba_headdim": 16,
    },
}
_SPECIAL["cohere_compass_text"] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        for kind in ("full_attention", "sliding_attention")
    },
}
_SPECIAL["mimo_v2_flash"] = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        for kind in ("full_attention", "sliding_attention")
    }
}
for _name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text"):
    _SPECIAL[_name] = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    }

# Fields of `_SPECIAL` with two layers of each type.
_DEEP: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "dots3_note_text": {"per_layer_config": {1: _WIDE_LATENT, 3: _WIDE_LATENT}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": [64] * 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
}


# Vision language models, whose decoders have three positions per token (M-RoPE).
VISION_MODEL_TYPES = tuple(
    name
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "hy_v4_vl")
    if name in CONFIG_MAPPING
)


def model_types() -> list[str]:
    """Return every architecture that generates text, in a stable order."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_MODEL_TYPES})


def mentions_rotation(model_type: str) -> bool:
    """Return whether an architecture's source mentions rotations."""
    config = CONFIG_MAPPING[model_type]
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if model_type in VISION_MODEL_TYPES else None
    kind = (mapping or MODEL_FOR_CAUSAL_LM_MAPPING)[config]
    kind = kind[0] if isinstance(kind, tuple) else kind
    return "rotary" in inspect.getsource(sys.modules[kind.__module__]).lower()


def tiny_config(model_type: str, copies: int = 1, **changes: Any) -> Any:
    """Return a tiny config of an architecture; its largest numbers are 128.

    Args:
        model_type: The architecture.
        copies: Layers of each type, where the default config has several types.
        **changes: Other values of fields.
    """
    default = CONFIG_MAPPING[model_type]()
    config = type(default)(**{**_shrunk(default, model_type, copies), **changes})
    for each in (config, config.get_text_config(decoder=True)):
        if not hasattr(each, "pad_token_id"):  # missing in some configs of transformers 5.0
            each.pad_token_id = 0
    return config


def tiny_model(model_type: str, seed: int = 0, copies: int = 1, **changes: Any) -> Any:
    """Return a tiny random model in evaluation mode, the same for the same seed."""
    config = tiny_config(model_type, copies, **changes)
    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if model_type in VISION_MODEL_TYPES else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "bias" not in name and not parameter.any():
                parameter.fill_(0.5)  # a temperature of 0 would hide attention
            # Large enough for rotations to change the logits.
            if parameter.ndim >= 2 and parameter.is_floating_point():
                parameter.normal_(0, 0.1)
            elif not torch.isfinite(parameter).all():
                parameter.zero_()  # some experts are not initialised
    return model


def _shrunk(config: Any, model_type: str, copies: int) -> dict[str, Any]:
    fields = config.to_dict()
    changes: dict[str, Any] = {}
    for name in ("rope_parameters", "mrope_section"):
        if isinstance(fields.get(name), dict | list):
            changes[name] = _rope(fields[name])
    for name, value in fields.items():
        if name in changes or name in ("model_type", "transformers_version"):
            continue
        sub = vars(config).get(name)
        if isinstance(value, dict) and hasattr(sub, "to_dict"):
            changes[name] = _shrunk(sub, value.get("model_type", ""), copies)
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        else:
            changes[name] = _size(name, value)
    changes |= _layers(fields, changes, copies)
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if groups is not None and groups == heads:  # as in multi-head latent attention
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    changes.pop("chunk_size_feed_forward", None)  # all configs have it, but not all accept it
    special = _SPECIAL.get(model_type, {}) | (_DEEP.get(model_type, {}) if copies > 1 else {})
    return {**changes, **copy.deepcopy(special)}


def _size(name: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return min(size, value) if value > 0 or "token" in name else value
    if _UNCHANGED.search(name) or abs(value) <= 8:
        return value
    return 32


def _rope(value: Any) -> Any:
    """Return rope parameters for heads of 16, with M-RoPE's sections divided over the 8 pairs."""
    if isinstance(value, list):
        return [4, 2, 2] if len(value) == 3 else [2] * len(value)
    changed = copy.deepcopy(value)
    for key, inner in changed.items():
        if isinstance(inner, dict) or key == "mrope_section":
            changed[key] = _rope(inner)
        elif key == "original_max_position_embeddings":
            changed[key] = TRAINED // 4
        elif key in ("short_factor", "long_factor"):
            changed[key] = inner[: HEAD_DIM // 2]
    if "yarn" in (changed.get("rope_type"), changed.get("type")):
        changed["factor"] = 4.0  # reaches TRAINED, as the published configs reach their length
    return changed


def _layers(fields: dict[str, Any], changes: dict[str, Any], copies: int) -> dict[str, Any]:
    """Return some layers of each type that the default config has, in its order."""
    changed: dict[str, Any] = {}
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds:
        each = list(dict.fromkeys(kinds))
        changed["layer_types"] = each * copies if len(each) > 1 else each * 2
        changed["num_hidden_layers"] = len(changed["layer_types"])
    count = changed.get("num_hidden_layers", changes.get("num_hidden_layers", 2))
    for name, value in fields.items():
        # Other lists with one entry per layer.
        if name == "layer_types" or not isinstance(value, list) or not value:
            continue
        if len(value) == fields.get("num_hidden_layers") and not isinstance(value[0], dict):
            changed[name] = value[:count]
    return changed
