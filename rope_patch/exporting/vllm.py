"""vLLM: overrides of config.json, in a form that old and new releases read alike.

Read from its code (model_executor/layers/rotary_embedding, models/gpt_oss.py, config/model.py and
transformers_utils/config.py, 2025-11 to 0.33.0). transformers reads the same fields alike. Where
vLLM would rotate transformers' own form differently, `longrope` expresses it with one stretch for
each pair:

- For YaRN they compute cos and sin for at most factor times the trained length.
- Older releases lack `proportional`, and newer ones do not divide by its factor.

YaRN's attention factor has two names there, and both are written: releases from 0.30 on read
attention_factor, earlier ones multiply the paper's factor by attn_factor.
"""

from __future__ import annotations

import json
from typing import Any

from rope_patch.exporting import deepseek_v4, vllm_plugin
from rope_patch.exporting.engine_fields import require_fields_are_read
from rope_patch.exporting.target import (
    YARN_OR_UNSCALED,
    Export,
    LayerRotation,
    Target,
    latent_attention_fields,
)
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.rope_config import TEMPERATURE_KEY, config_rope_type
from rope_patch.utils.errors import Refused

NAME = "vllm"

_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def export(target: Target) -> Export:
    """Return arguments for `vllm serve`, equal to `hf_overrides` and `max_model_len` of its `LLM`.

    What vLLM has no form for is said in the form of rope_patch's plugin, if the plugin can.

    Raises:
        ValueError: vLLM has no form for the rotation, and the plugin cannot add it.
    """
    try:
        return _native_export(target)
    except Refused as refusal:
        if target.method is None:
            raise
        if reason := vllm_plugin.plugin_refusal(target):
            raise Refused(f"{refusal} (nor can rope_patch's plugin for vLLM: {reason})") from None
        return vllm_plugin.export(target)


def _native_export(target: Target) -> Export:
    config = overrides(target, target.length, target.length)
    return Export(
        engine=NAME,
        config=config,
        arguments=[
            "--hf-overrides",
            json.dumps(config),
            "--max-model-len",
            str(target.length),
        ],
        notes=[
            "the command line says it all; with the fields in config.json, --max-model-len is "
            "enough",
            "for releases that run on transformers 5; one on transformers 4 reads the fields that "
            "the engine transformers4 has",
            *_notes(target, config),
        ],
    )


def overrides(target: Target, length: int, positions: int) -> dict[str, Any]:
    """Return the config overrides for a model's rotation.

    Args:
        target: The model.
        length: Length of the longest sequence, in tokens.
        positions: `max_position_embeddings`: vLLM computes cos and sin for this many positions and
            refuses a larger max_model_len.

    Returns:
        Value of `hf_overrides`, nested like the config.
    """
    target.require_static(NAME)
    require_fields_are_read(target, NAME)
    all_parameters = {
        layer_type: _rope_fields(target, layer_type, rotation, length)
        for layer_type, rotation in target.rotations.items()
    }
    target.require_valid(NAME, all_parameters)
    fields = {"max_position_embeddings": positions, **target.fields(all_parameters)}
    if target.model_type == deepseek_v4.MODEL_TYPE:
        fields |= deepseek_v4.changed_thetas(target)
    if (rotation := target.rotations.get(None)) is not None and rotation.has_temperature:
        own = rotation.checkpoint_parameters  # models/mistral.py reads it from here alone
        fields["llama_4_scaling"] = {
            "original_max_position_embeddings": own["original_max_position_embeddings"],
            "beta": own[TEMPERATURE_KEY],
        }
    return target.nest_fields(fields)


def _rope_fields(
    target: Target, layer_type: str | None, rotation: LayerRotation, length: int
) -> dict[str, Any]:
    parameters = dict(rotation.parameters)
    if target.model_type == "gpt_oss":
        return _gpt_oss_fields(target, rotation, length)
    if target.model_type == deepseek_v4.MODEL_TYPE:
        return _deepseek_v4_fields(target, layer_type, rotation, length)
    scaling = rotation.scaling
    if target.is_mla:
        return latent_attention_fields(target, NAME, rotation)
    if scaling == "yarn":
        table_length = parameters["factor"] * parameters["original_max_position_embeddings"]
        # vLLM merges overrides of a nested config into the config's values.
        is_merged = (
            target.text is not target.config
            and config_rope_type(rotation.checkpoint_parameters) == "yarn"
        )
        if length <= table_length:
            return _yarn_fields(rotation, is_merged)
    elif scaling == "default" or (
        scaling in ("linear", "llama3") and "mrope_section" not in parameters
    ):
        return parameters
    if "mrope_section" in parameters:
        raise target.refuse(
            NAME,
            "for a model with several positions a token (M-RoPE) it reads a new theta, or YaRN; "
            "use ntk, abf or yarn",
        )
    if not target.is_half_layout:
        raise target.refuse(
            NAME,
            "its longrope, which could say it pair by pair, rotates halves of heads, and this "
            "model rotates neighbours; use linear, ntk, abf, llama3 or yarn",
        )
    # Releases that run such a checkpoint know `proportional`, though not its factor.
    if (fields := rotation.as_proportional()) is not None:
        return fields
    fields = rotation.as_longrope(length) if scaling != "longrope" else parameters
    factor = rotation.attention_factor
    return {**fields, "short_mscale": factor, "long_mscale": factor}


def _yarn_fields(rotation: LayerRotation, is_merged: bool) -> dict[str, Any]:
    """Return YaRN's fields, with the attention factor in the form of every release."""
    parameters, own = rotation.parameters, rotation.checkpoint_parameters
    # If vLLM merges, the checkpoint's fields stay where none is written over them.
    keys = parameters.keys() | (own.keys() if is_merged else set())
    fields = {**(_YARN_DEFAULTS if is_merged else {}), **parameters}
    if not {"attention_factor", "mscale"} & keys:
        return fields
    factor = rotation.attention_factor  # wins over mscale, which may be left of the checkpoint's
    fields |= {"attention_factor": factor, "attn_factor": factor / yarn_mscale(fields["factor"])}
    return {key: value for key, value in fields.items() if "mscale" not in key}


def _gpt_oss_fields(target: Target, rotation: LayerRotation, length: int) -> dict[str, Any]:
    """Return YaRN, the only scaling of vLLM's gpt-oss; a factor of 1 is plain theta."""
    parameters = rotation.parameters
    if rotation.scaling == "default":
        return {
            "rope_type": "yarn",
            "rope_theta": rotation.theta,
            "factor": 1.0,
            "original_max_position_embeddings": length,
            **_YARN_DEFAULTS,
        }
    table_length = parameters.get("factor", 1) * parameters.get(
        "original_max_position_embeddings", 0
    )
    if (
        rotation.scaling == "yarn"
        and "attention_factor" not in parameters
        and length <= table_length
    ):
        return {**_YARN_DEFAULTS, **parameters}
    raise target.refuse(
        NAME,
        "gpt-oss takes there YaRN with its own attention factor, up to factor times the trained "
        f"length, or a new theta; {YARN_OR_UNSCALED}",
    )


def _deepseek_v4_fields(
    target: Target, layer_type: str | None, rotation: LayerRotation, length: int
) -> dict[str, Any]:
    """Return DeepSeek-V4's fields, if its tables of cos and sin reach the length."""
    fields = deepseek_v4.layer_fields(target, NAME, layer_type)
    if rotation.scaling == "yarn":
        table_length = fields["factor"] * fields["original_max_position_embeddings"]
        if length > table_length:
            raise target.refuse(
                NAME,
                f"its tables for DeepSeek-V4 end at factor times the original length, "
                f"{table_length:,.0f} tokens, and {length:,} are asked; use a larger factor",
            )
    return fields


def _notes(target: Target, config: dict[str, Any]) -> list[str]:
    fields = config if target.text is target.config else next(iter(config.values()))
    rope_parameters = fields["rope_parameters"]
    is_flat = "rope_type" in rope_parameters
    all_parameters = [rope_parameters] if is_flat else list(rope_parameters.values())
    notes = []
    if any("short_mscale" in p for p in all_parameters):
        notes.append(
            "said pair by pair as longrope, with one set for short and long: vLLM rotates by it in "
            "plain torch, slower than its kernels for other types"
        )
    return notes
