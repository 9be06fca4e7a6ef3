"""mlx-lm: fields of config.json.

Read from mlx_lm/models/rope_utils.py and the model files (d78bf58, 2026-08). They read transformers
4's `rope_theta` and `rope_scaling`, and none of transformers 5's fields:

- YaRN's attention_factor and truncate are ignored; mscale and mscale_all_dim are read separately.
- longrope always uses the long factors, with an attention factor from two lengths.
- dynamic changes the base with every call and keeps stale cached keys, even within one prompt.
- Many model files read a theta and no scaling.
"""

from __future__ import annotations

import math
from typing import Any

from rope_patch.exporting.target import Export, LayerRotation, Target, original_length_for_factor
from rope_patch.methods.ntk_by_parts import yarn_mscale

NAME = "mlx"

# Architectures whose model file reads rope_scaling and max_position_embeddings.
_SCALING_ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "phi3",
    "apertus",
    "granite",
    "granitemoe",
    "mimo",
    "olmo2",
    "seed_oss",
)
# Architectures whose model file reads rope_theta alone.
_THETA_ONLY_ARCHITECTURES = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
)


def export(target: Target) -> Export:
    """Return the fields of a converted model's config.json.

    Raises:
        ValueError: mlx-lm has no form for the rotation.
    """
    target.require_static(NAME)
    if target.model_type not in _SCALING_ARCHITECTURES + _THETA_ONLY_ARCHITECTURES:
        raise target.refuse(
            NAME,
            f"which fields it reads for {target.model_type} is not known here; known are "
            f"{', '.join(_SCALING_ARCHITECTURES + _THETA_ONLY_ARCHITECTURES)}",
        )
    fields: dict[str, Any] = {"max_position_embeddings": target.length}
    if target.layers_differ:
        rotation = target.rotations["full_attention"]
        windows = target.rotations["sliding_attention"]
        if windows.scaling != "default":
            raise target.refuse(
                NAME, "windows take a theta there and no scaling; use ntk or abf for them"
            )
        fields["rope_local_base_freq"] = windows.theta
    else:
        rotation = target.rotations[None]
    fields["rope_theta"] = rotation.theta
    share = rotation.parameters.get("partial_rotary_factor", 1.0)
    if share != 1 and rotation.scaling != "proportional":
        fields["partial_rotary_factor"] = share
    fields |= _rope_fields(target, rotation)
    notes = [
        "for the config.json that mlx_lm.convert writes, or for the model's own before converting; "
        "mlx-lm has no option for them on its command line"
    ]
    if isinstance(_original_length_field(fields), float):
        notes.append(
            "original_max_position_embeddings is not the trained length there: mlx-lm makes the "
            "attention factor from it and max_position_embeddings, and uses it for nothing else"
        )
    return Export(engine=NAME, config=target.nest_fields(fields), notes=notes)


def _original_length_field(fields: dict[str, Any]) -> Any:
    inner = fields["rope_scaling"] or {}
    return {**fields, **inner}.get("original_max_position_embeddings")


def _rope_fields(target: Target, rotation: LayerRotation) -> dict[str, Any]:
    """Return `rope_scaling` and the fields beside it."""
    scaling, parameters = rotation.scaling, rotation.parameters
    if scaling == "default":
        return {"rope_scaling": None}
    if target.model_type in _THETA_ONLY_ARCHITECTURES:
        raise target.refuse(
            NAME, f"its {target.model_type} takes a theta and no scaling; use ntk or abf"
        )
    if target.model_type != "phi3":
        if scaling == "linear":
            return {"rope_scaling": {"rope_type": "linear", "factor": parameters["factor"]}}
        if scaling == "llama3":
            rope_scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
            return {"rope_scaling": rope_scaling}
        if scaling == "yarn" and parameters.get("truncate", True) and parameters["factor"] > 1:
            return {"rope_scaling": _yarn_fields(rotation)}
        if scaling == "proportional" and rotation.frequencies.inv_freq.any():
            return {"rope_scaling": _proportional_fields(rotation)}
    if target.model_type == "gpt_oss":
        raise target.refuse(
            NAME,
            "its gpt_oss takes no stretches pair by pair; use linear, ntk, abf, llama3 or yarn "
            "with truncate=True",
        )
    original: float = original_length_for_factor(
        target, NAME, target.length, rotation.attention_factor
    )
    sets = {"long_factor": rotation.stretch, "short_factor": rotation.stretch}
    outer = {"original_max_position_embeddings": float(original)}
    if target.model_type == "phi3":
        return {"rope_scaling": {"type": "longrope", **sets}, **outer}
    return {"rope_scaling": {"rope_type": "longrope", **sets, **outer}}


def _yarn_fields(rotation: LayerRotation) -> dict[str, Any]:
    names = ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    fields = {key: rotation.parameters[key] for key in names if key in rotation.parameters}
    factor, attention_factor = fields["factor"], rotation.attention_factor
    if attention_factor != yarn_mscale(factor):
        fields["mscale"] = (attention_factor - 1) / (0.1 * math.log(factor))
        fields["mscale_all_dim"] = 0
    return fields


def _proportional_fields(rotation: LayerRotation) -> dict[str, Any]:
    inv_freq = rotation.frequencies.inv_freq
    rotating = int((inv_freq > 0).sum())
    # mlx-lm rounds share * dimensions down, so add half a dimension.
    share = (2 * rotating + 0.5) / (2 * len(inv_freq)) if rotating < len(inv_freq) else 1.0
    factor = float(rotation.parameters.get("factor") or 1.0)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}
