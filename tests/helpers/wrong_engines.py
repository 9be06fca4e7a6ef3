"""Engines of the tiny trained models that rotate as asked (YaRN x4), or wrongly, as real ones did.

The rotations are transformers' own, from configs, or tables computed here.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from helpers.engine_server import ShortTable

ASSETS = Path(__file__).parents[1] / "assets"
TRAINED, FACTOR = 256, 4.0
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": FACTOR,
    "original_max_position_embeddings": TRAINED,
}
# What the far layers' rope_parameters become, and the verdict.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "as asked": (YARN, "as-asked"),
    "factor ignored": ({"rope_type": "default", "rope_theta": 1e4}, "unscaled"),
    "attention factor dropped": ({**YARN, "attention_factor": 1.0}, "no-attention-factor"),
    "another theta": ({**YARN, "rope_theta": 5e5}, "theta-500000"),
    "attention factor twice": (
        {**YARN, "attention_factor": (0.1 * math.log(FACTOR) + 1) ** 2},
        "attention-factor-twice",
    ),
    "linear for yarn": (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": FACTOR},
        "linear-4",
    ),
    "ntk for yarn": (
        {"rope_type": "default", "rope_theta": 1e4 * FACTOR ** (32 / 30)},  # heads of 32
        "ntk-4",
    ),
    "factor squared": ({**YARN, "factor": FACTOR**2}, "factor-16"),
    "twice the factor": ({**YARN, "factor": 2 * FACTOR}, "factor-8"),
    "half the factor": ({**YARN, "factor": FACTOR / 2}, "factor-2"),
    "original length lost": (
        {**YARN, "original_max_position_embeddings": round(FACTOR * TRAINED)},
        "original-length-lost",
    ),
    # transformers reads `truncate` from the wrong level where there are several layer types.
    "ramp between pairs": ({**YARN, "truncate": False}, "truncate"),
}


# Rotations that no hypothesis has.
ODD_CONFIGS: dict[str, dict[str, Any]] = {
    "odd theta": {"rope_type": "default", "rope_theta": 2.2e4},
    "odd factor": {**YARN, "factor": 5.5},
    "odd ramp": {**YARN, "beta_fast": 8.0},
    "odd attention factor": {**YARN, "attention_factor": 1.06},
}


def plain(name: str = "llama") -> Any:
    """Return a tiny trained model."""
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{name}", dtype=torch.float32).eval()


def configured(name: str, parameters: dict[str, Any], sliding: dict[str, Any] | None = None) -> Any:
    """Return a tiny trained model with other `rope_parameters` in its far layers.

    Args:
        name: The model's name.
        parameters: Of the layers with full attention.
        sliding: Of the layers with windows; theirs unless given.
    """
    model = plain(name)
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = round(FACTOR * TRAINED)
    own = config.rope_parameters
    if "full_attention" in own:
        own["full_attention"] = dict(parameters)
        own["sliding_attention"] = dict(sliding or own["sliding_attention"])
    else:
        config.rope_parameters = dict(parameters)
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def scaled_twice(name: str = "llama") -> Any:
    """Return a model whose frequencies were scaled by YaRN, and once more."""
    model, plain_model = configured(name, YARN), plain(name)
    rotary = model.model.rotary_emb
    once, none = rotary.inv_freq.double(), plain_model.model.rotary_emb.inv_freq.double()
    rotary.inv_freq = (once * once / none).float()
    rotary.attention_scaling = rotary.attention_scaling**2
    return model


def short_table(name: str = "llama", wraps: bool = True) -> Any:
    """Return a model whose table of cos and sin ends at the trained length."""
    model = configured(name, YARN)
    model.model.rotary_emb = ShortTable(model.model.rotary_emb, TRAINED, wraps)
    return model


def on_top(name: str, own: Any, factor: float) -> Any:
    """Return a model whose own YaRN was scaled by another YaRN, pair by pair."""
    model = configured(name, own)
    once, plain_ = model.model.rotary_emb, plain(name).model.rotary_emb
    again = configured(name, {**own, "factor": factor}).model.rotary_emb
    once.inv_freq = (once.inv_freq.double() * again.inv_freq / plain_.inv_freq).float()
    once.attention_scaling = once.attention_scaling * again.attention_scaling
    return model


def doubled_positions(name: str = "llama") -> Any:
    """Return a model that rotates position p as 2 p."""
    model = configured(name, YARN)

    def double(module: Any, args: Any, kwargs: Any) -> Any:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": 2 * kwargs["position_ids"]}
        return (args[0], 2 * args[1], *args[2:]), kwargs

    model.model.rotary_emb.register_forward_pre_hook(double, with_kwargs=True)
    return model


@torch.no_grad()
def paired_as_neighbours(name: str = "llama") -> Any:
    """Return a model that rotates neighbours, by reordering the weights of queries and keys."""
    model = configured(name, YARN)
    width = model.config.head_dim
    order = torch.arange(width).view(-1, 2).T.flatten()
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            heads = projection.weight.view(-1, width, projection.weight.shape[-1])
            projection.weight.copy_(heads[:, order].reshape(projection.weight.shape))
        for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)):
            if norm is not None:
                norm.weight.copy_(norm.weight[order])
    return model


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Return a model in 16 bits, with frequencies in float32 as in checkpoints that are loaded."""
    rotary = model.model.rotary_emb
    exact = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    model.to(dtype)
    for name, buffer in exact.items():
        setattr(rotary, name, buffer)
    return model


@torch.no_grad()
def round_to_8_bits(model: Any) -> Any:
    """Return a model whose matrices are rounded to 8 bits, with a scale for each row."""
    for weight in model.parameters():
        if weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    return model
