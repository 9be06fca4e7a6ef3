"""A tiny random model of a live model's class, made from its config with every size shrunk.

Sizes are found by the names of a config's fields, so that an architecture of a later release
shrinks, too. What a rotation depends on keeps its kind: the rope type, partial rotation, sections
of M-RoPE, grouped or latent attention, layer types. What cannot be shrunk raises `CannotShrink`.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rope_patch.transformers_api.models import (
    attention_implementation,
    set_attention_implementation,
)
from rope_patch.utils.errors import describe_error

TRAINED = 64  # tokens
VOCABULARY = 128
FIRST_TOKEN = 8  # the first id that is never a special one
_HEAD_DIM = 16  # 8 rotated pairs, the slowest of which turns little within the trained length

# Implementations of attention that a CPU runs; other models are proven with sdpa.
_ON_CPU = ("sdpa", "eager")

# The first rule that matches a field's name gives its size; a smaller size stays.
_SIZES: list[tuple[str, int]] = [
    # Sparse attention that sees all keys; a choice among a few would hang on the last bit.
    (r"index.*top_?k|keep_window_size|indexer_budget", 1024),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"(token_id|token_index)$", 3),
    (r"vocab_size", VOCABULARY),
    (r"(max_position_embeddings|n_positions|max_seq_len|model_max_length)$", TRAINED),
    (r"^original_max_position_embeddings$", TRAINED // 4),
    (r"sliding_window|attention_window|attention_chunk_size|window_size", TRAINED // 2),
    (r"(num_key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads)$", 2),
    (r"(mamba|linear|conv|ssm|time).*(n_heads|num.*heads)|mamba_n_heads|n_mamba_heads", 8),
    (r"(num.*heads|n_heads?|num_head|n_head)$", 4),
    (r"(num_experts_per_tok|top_k|topk|moe_topk|moe_k|num_experts_per_token)$", 2),
    (
        r"(n_group|topk_group|n_groups|num_expert_groups?|num_groups|mamba_n_groups|expert_groups)$",
        1,
    ),
    (r"(n_shared_experts|num_shared_experts)$", 1),
    (r"(num.*experts|n_routed_experts|moe_num_experts|num_local_experts|zero_expert_num)$", 4),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    (r"(num_nextn_predict_layers|mtp.*layers|num_kv_shared_layers)$", 0),
    (r"(num.*layers|n_layers?|num_blocks)$", 2),
    (r"qk_head_dim", 2 * _HEAD_DIM),
    (r"(head_dim|head_size|lora_rank|rope_head_dim|kv_channels|rotary_dim)", _HEAD_DIM),
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
# Fields that describe a checkpoint, not the architecture.
_DROPPED = ("quantization_config", "compression_config", "transformers_version", "auto_map")

# Fields whose sizes follow from each other, by model_type.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}  # together twice the hidden size
_RELATED: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": _MAMBA,
    "zamba2": {
        "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,  # attention reads the hidden state and the embedding
        "attention_head_dim": 32,
        "mamba_headdim": 16,
    },
}


class CannotShrink(Exception):
    """A model's class makes no tiny model that runs, for the reason in the message."""


def tiny_model(model: nn.Module, text_config: Any, *, last: Collection[str | None] = ()) -> Any:
    """Return a tiny random model of a live model's class, in float32 on the CPU.

    It is the same one every time, and draws nothing from torch's generators.

    Args:
        model: The live model, which may be wrapped (PEFT, torch.compile), or on the meta device.
        text_config: Its text config before any patch.
        last: Layer types that come last, in one layer each. With them, all inputs of these layers
            come from layers that no extension changes.

    Raises:
        CannotShrink: Neither the model's class nor its text decoder's can be made so.
    """
    reasons = []
    for kind, config in _candidates(model, text_config):
        try:
            tiny = _build(kind, tiny_config(config, last), _attention(model))
            tiny(input_ids=torch.full((1, 3), FIRST_TOKEN), use_cache=False)
            if last:
                _require_one_attention_a_layer(tiny)
            return tiny
        except Exception as error:  # classes from anywhere can raise anything
            reasons.append(f"{kind.__name__}: {describe_error(error)}")
    raise CannotShrink("; ".join(reasons) or f"{type(model).__name__} is not of transformers")


def _candidates(model: nn.Module, text_config: Any) -> Iterator[tuple[type, Any]]:
    """Yield classes and their configs: the whole model's, then its text part's."""
    parts = models_within(model)
    if not parts:
        return
    whole = parts[0]
    config = whole.config
    if isinstance(config, type(text_config)):
        yield type(whole), text_config
        return
    names = [
        name for name in config.sub_configs if isinstance(getattr(config, name), type(text_config))
    ]
    if names:
        config = copy.deepcopy(config)
        setattr(config, names[0], text_config)
        yield type(whole), config
    text = next((part for part in parts if isinstance(part.config, type(text_config))), None)
    if text is not None:
        yield type(text), text_config


def models_within(model: nn.Module) -> list[Any]:
    """Return the models of transformers within a module, the outermost first."""
    from transformers import PreTrainedModel  # takes seconds, which importing this need not

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _require_one_attention_a_layer(tiny: Any) -> None:
    """Raise unless each layer has one attention, so that the last layer has the last one."""
    indices = {getattr(module, "layer_idx", None) for module in tiny.modules()} - {None}
    layers = getattr(tiny.config.get_text_config(decoder=True), "layer_types", None) or [None]
    if len(indices) != len(layers):  # LongCat-Flash has two attentions in each layer
        raise CannotShrink(f"it has {len(indices)} attentions, expected {len(layers)}")


def _attention(model: nn.Module) -> str:
    """Return the implementation of attention of a model, where a CPU runs it."""
    own = attention_implementation(models_within(model)[0].config.get_text_config(decoder=True))
    return own if own in _ON_CPU else "sdpa"


# -- the config ------------------------------------------------------------------------------------


def tiny_config(config: Any, last: Collection[str | None] = ()) -> Any:
    """Return a config of the same kind whose largest size is 128.

    Args:
        config: A model's config.
        last: See `tiny_model`.
    """
    return type(config).from_dict(_shrink(config, last))


def _shrink(config: Any, last: Collection[str | None]) -> dict[str, Any]:
    """Return all fields of a config, shrunk."""
    fields = config.to_dict()
    for name in _DROPPED:
        fields.pop(name, None)
    head_dim = _original_head_dim(fields)
    tiny_head_dim = _tiny_head_dim(fields)
    tiny: dict[str, Any] = {}
    for name, value in fields.items():
        sub = vars(config).get(name)
        if isinstance(value, dict) and hasattr(sub, "to_dict"):
            tiny[name] = _shrink(sub, last)
        elif "rope" in name and isinstance(value, dict | list):
            tiny[name] = _shrink_rope(name, value, tiny_head_dim / head_dim)
        else:
            tiny[name] = _tiny_value(name, value)
    if tiny.get("head_dim"):
        tiny["head_dim"] = min(tiny_head_dim, fields["head_dim"])
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if groups is not None and groups == heads:  # multi-head latent attention has one group a head
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    tiny |= _RELATED.get(fields.get("model_type", ""), {})
    return tiny | _layers(fields, tiny, last)


def _tiny_value(name: str, value: Any) -> Any:
    """Return a field's value; a whole number shrinks by the field's name."""
    if name in ("partial_rotary_factor", "rotary_pct") and value:
        return 2 * max(1, round(value * _HEAD_DIM / 2)) / _HEAD_DIM  # an even part of the head
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return min(size, value) if value > 0 or "token" in name else value
    if _UNCHANGED.search(name) or abs(value) <= 8:
        return value
    return 32


def _original_head_dim(fields: dict[str, Any]) -> int:
    """Return the width of a head, or of its part that rotates (latent attention)."""
    for name in ("qk_rope_head_dim", "head_dim"):
        if isinstance(fields.get(name), int):
            return fields[name]
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else _HEAD_DIM


def _tiny_head_dim(fields: dict[str, Any]) -> int:
    """Return a head's width: wider where M-RoPE divides a part of it into sections."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return _HEAD_DIM
    return round(_HEAD_DIM / rope.get("partial_rotary_factor", 1.0))


def _shrink_rope(name: str, value: Any, ratio: float) -> Any:
    """Return the rope field `name` for heads whose width is `ratio` times the old one."""
    if isinstance(value, list):  # one number for each pair, or sections of pairs
        if name in ("short_factor", "long_factor"):  # from the fastest pair to the slowest
            count = max(1, round(len(value) * ratio))
            return [value[i * len(value) // count] for i in range(count)]
        if name == "mrope_section":
            pairs = max(len(value), round(sum(value) * ratio))
            sections = [max(1, int(n * pairs / sum(value))) for n in value]
            sections[-1] += pairs - sum(sections)
            return sections
        return value
    if not isinstance(value, dict):
        shrinks = name in ("original_max_position_embeddings", "partial_rotary_factor")
        return _tiny_value(name, value) if shrinks else value
    # Parameters, or parameters by layer type.
    tiny = {key: _shrink_rope(key, inner, ratio) for key, inner in value.items()}
    if "yarn" in (tiny.get("rope_type"), tiny.get("type")) and "factor" in tiny:
        tiny["factor"] = 4.0  # reaches TRAINED, as published configs reach their length
    return tiny


def _layers(
    fields: dict[str, Any], tiny: dict[str, Any], last: Collection[str | None]
) -> dict[str, Any]:
    """Return the fields of layers: one of each type, or two of the only type."""
    # With `last`, there is one layer of each type, and one of the types in `last` is at the end.
    kinds = fields.get("layer_types")
    count = tiny.get("num_hidden_layers", 2)
    picks = list(range(min(count, 1) if last else count))
    if isinstance(kinds, list) and kinds:
        each = list(dict.fromkeys(kinds))
        if last:
            extended = [kind for kind in each if kind in last] or each
            # Only one may come last, because the output of the other ones changes.
            one = "full_attention" if "full_attention" in extended else extended[-1]
            each = [kind for kind in each if kind not in extended] + [one]
        picks = [kinds.index(kind) for kind in each]
        if len(picks) == 1 and not last:
            picks *= 2
    changed: dict[str, Any] = {}
    if "num_hidden_layers" in fields:
        changed["num_hidden_layers"] = len(picks)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == fields.get("num_hidden_layers"):
            changed[name] = [value[i] for i in picks if i < len(value)]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            of_layer = {int(key): inner for key, inner in value.items()}
            changed[name] = {
                new: {key: _tiny_value(key, each) for key, each in of_layer[i].items()}
                for new, i in enumerate(picks)
                if isinstance(of_layer.get(i), dict)
            }
    return changed


# -- the model -------------------------------------------------------------------------------------


def _build(kind: Any, config: Any, attention: str) -> Any:
    """Return a model with random weights, large enough for rotations to change its logits."""
    set_attention_implementation(config, attention)
    generator = torch.Generator().manual_seed(0)
    with _OwnRandomness(generator):
        model = kind(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.1, generator=generator)
        elif "bias" not in name and not parameter.any():
            parameter.fill_(0.5)  # a scale of 0 would hide attention
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.eos_token_id, generation.pad_token_id = None, 0
    return model


class _OwnRandomness(TorchDispatchMode):
    """Let all random numbers of this thread come from one generator, not torch's own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            with contextlib.suppress(StopIteration):
                func = next(each for each in _overloads(func) if _takes_generator(each))
                kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def _overloads(func: Any) -> Iterator[Any]:
    """Yield an op, and its overload of the same arguments and a generator."""
    yield func
    own = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        others = [(each.name, str(each.type)) for each in overload._schema.arguments]
        if [each for each in others if each[0] != "generator"] == own:
            yield overload


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)
