"""Compute rotations by transformers' functions, on the config class of a published model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import formulas
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


# -- transformers' live modules: after calls, in a batch, after a cast -----------------------------


def _positions(tokens: int) -> torch.Tensor:
    return torch.tensor([[0, tokens - 1]])


def _read(module: torch.nn.Module) -> Rotation:
    return module.inv_freq.double().tolist(), float(module.attention_scaling)


def rotation_after(model: Published, before: int, tokens: int) -> Rotation:
    """Return dynamic scaling's frequencies for a text, after a text of `before` tokens."""
    module = rotary_class(model)(scaled_config(model, "dynamic", factor=1.0))
    for length in (before, tokens):
        module(torch.zeros(1), _positions(length))
    return _read(module)


def rotation_beside(model: Published, longer: int, tokens: int) -> Rotation:
    """Return the frequencies of a text in a batch with a longer one, by the config's scaling."""
    module = rotary_class(model)(model.config())
    module(torch.zeros(1), torch.cat([_positions(longer), _positions(tokens)]))
    return _read(module)


def rotation_after_cast(model: Published) -> Rotation:
    """Return the frequencies of the config's scaling after `model.bfloat16()`."""
    return _read(rotary_class(model)(model.config()).bfloat16())


def part_of_the_head(model: Published, share: float) -> Rotation:
    """Return the rotation of `partial_rotary_factor` outside `proportional`, padded with zeros."""
    frequencies, _ = rotation(model, "linear", factor=1.0, partial_rotary_factor=share)
    unrotated = len(formulas.default(model)[0]) - len(frequencies)
    return frequencies + [0.0] * unrotated, 1.0
