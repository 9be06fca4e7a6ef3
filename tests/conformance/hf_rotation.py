"""Compute rotations by transformers' functions, on the config class of a published model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from formulas import Rotation
from published import Published
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_MODULES = {"gemma3_text": "gemma3"}


def has(kind: str) -> bool:
    """Return whether this version of transformers knows the scaling."""
    return kind == "default" or kind in ROPE_INIT_FUNCTIONS


def rotary_class(model: Published) -> Any:
    """Return the class of the model's rotary module."""
    name = _MODULES.get(model.model_type, model.model_type)
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    return next(
        thing
        for name, thing in vars(module).items()
        if name.endswith("RotaryEmbedding") and hasattr(thing, "compute_default_rope_parameters")
    )


def scaled_config(model: Published, kind: str, full: int | None = None, **parameters: Any) -> Any:
    """Return the model's config with another scaling.

    Args:
        model: The layers to change; others keep their scaling.
        kind: transformers' rope_type.
        full: max_position_embeddings; by default the trained length.
        **parameters: The scaling's parameters.
    """
    fields = {name: value for name, value in model.fields.items() if name != "rope_scaling"}
    fields["max_position_embeddings"] = full or model.trained_length
    config = type(model.config())(**fields)
    rope_parameters = {"rope_type": kind, "rope_theta": model.theta, **parameters}
    if kind in ("yarn", "llama3", "longrope"):
        rope_parameters.setdefault("original_max_position_embeddings", model.trained_length)
    if model.rotary_dim < model.head_dim:
        rope_parameters.setdefault("partial_rotary_factor", model.rotary_dim / model.head_dim)
    if model.layer_type is None:
        config.rope_parameters = rope_parameters
    else:
        config.rope_parameters = {**config.rope_parameters, model.layer_type: rope_parameters}
    return config


def rotation(
    model: Published, kind: str, tokens: int | None = None, full: int | None = None, **more: Any
) -> Rotation:
    """Return transformers' rotation for `scaled_config` and a sequence length."""
    return rotation_of(model, scaled_config(model, kind, full, **more), kind, tokens)


def rotation_of(
    model: Published, config: PreTrainedConfig, kind: str, tokens: int | None = None
) -> Rotation:
    layers = {} if model.layer_type is None else {"layer_type": model.layer_type}
    if kind == "default":
        inv_freq, attention_factor = rotary_class(model).compute_default_rope_parameters(
            config, **layers
        )
    else:
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), seq_len=tokens, **layers
        )
    return inv_freq.double().tolist(), float(attention_factor)
