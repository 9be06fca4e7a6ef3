"""mlx-lm and mlx-vlm: fields of config.json.

Read from rope_utils.py and the model files of mlx-lm 0.32.2 and mlx-vlm 0.7.10. Most read
transformers 4's `rope_theta` and `rope_scaling`, and some transformers 5's `rope_parameters`:

- YaRN's attention_factor and truncate are ignored; mscale and mscale_all_dim are read separately.
- longrope uses the long factors in mlx-lm, with an attention factor from two lengths. mlx-vlm picks
  a set by the length, and reads short_mscale and long_mscale.
- dynamic changes the base with every call in mlx-lm and keeps stale cached keys, even within one
  prompt; mlx-vlm does not have it.
- Many model files read a theta and no scaling, among them those of mlx-vlm with several positions a
  token (M-RoPE), such as Qwen3.5: their rotary class takes a theta and no scaling.
"""

from __future__ import annotations

import math
from typing import Any

from rope_patch.exporting import deepseek_v4
from rope_patch.exporting.engine_fields import reads_rope_parameters, require_fields_are_read
from rope_patch.exporting.target import (
    PRESERVED_KEYS,
    Export,
    LayerRotation,
    Target,
    latent_attention_fields,
    original_length_for_factor,
)
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.rope_config import TEMPERATURE_KEY, config_rope_type

NAME, NAME_VLM = "mlx", "mlx-vlm"

_TOOLS = {NAME: "mlx-lm", NAME_VLM: "mlx-vlm"}
_PLAIN = {"rope_type": "default"}
# Files that take per-pair factors with an attention factor from two lengths, in mlx-vlm too.
_BY_LENGTHS = ("phi3",)


def export(target: Target) -> Export:
    """Return the fields of a converted model's config.json for mlx-lm.

    Raises:
        ValueError: mlx-lm has no form for the rotation.
    """
    return _export(target, NAME)


def export_vlm(target: Target) -> Export:
    """Return the fields of a converted model's config.json for mlx-vlm.

    Raises:
        ValueError: mlx-vlm has no form for the rotation.
    """
    return _export(target, NAME_VLM)


def _export(target: Target, engine: str) -> Export:
    target.require_static(engine)
    require_fields_are_read(target, engine)
    tool = _TOOLS[engine]
    fields = {"max_position_embeddings": target.length, **_fields(target, engine)}
    notes = [
        f"for the config.json that {tool.replace('-', '_')}.convert writes, or for the model's own "
        f"before converting; {tool} has no option for them on its command line"
    ]
    if isinstance(_original_length_field(fields), float):
        notes.append(
            f"original_max_position_embeddings is not the trained length there: {tool} makes the "
            "attention factor from it and max_position_embeddings, and uses it for nothing else"
        )
    if target.model_type == deepseek_v4.MODEL_TYPE:
        notes.append(deepseek_v4.PUBLISHED_NOTE)
    return Export(engine=engine, config=target.nest_fields(fields), notes=notes)


def _fields(target: Target, engine: str) -> dict[str, Any]:
    """Return the fields of the rotation, in the names that the model file reads."""
    if target.model_type == deepseek_v4.MODEL_TYPE:
        thetas, yarn = deepseek_v4.flat_fields(target, engine)
        return {**thetas, "rope_scaling": yarn}
    if target.model_type in ("gemma4_text", "gemma4_unified_text"):
        layers = {
            layer_type: {"rope_theta": r.theta, **(_scaling(target, r, engine) or _PLAIN)}
            for layer_type, r in target.rotations.items()
        }
        return {"rope_parameters": layers}
    fields: dict[str, Any] = {}
    if target.layers_differ:
        rotation, fields = _gemma3_layers(target, engine)
    else:
        rotation = target.rotations[None]
    scaling = _scaling(target, rotation, engine)
    share = rotation.parameters.get("partial_rotary_factor", 1.0)
    if share != 1 and rotation.scaling != "proportional":
        fields["partial_rotary_factor"] = share
    outer: dict[str, Any] = {}
    if target.model_type in _BY_LENGTHS and scaling is not None:
        outer = {
            "original_max_position_embeddings": scaling.pop("original_max_position_embeddings")
        }
    own = rotation.checkpoint_parameters
    kept = {key: own[key] for key in (*PRESERVED_KEYS, TEMPERATURE_KEY) if key in own}
    if rotation.has_temperature:  # of the queries, from this length on
        kept["original_max_position_embeddings"] = own["original_max_position_embeddings"]
    if scaling is None and "mrope_section" in kept:
        # Files that read `rope_scaling` find the sections there, and ask for the old name.
        sections = {key: kept[key] for key in PRESERVED_KEYS if key.startswith("mrope")}
        scaling = {"type": "default", **_PLAIN, **sections}
    fields |= {"rope_theta": rotation.theta, "rope_scaling": scaling, **outer}
    if reads_rope_parameters(target, engine):
        fields["rope_parameters"] = {
            **kept,
            "rope_theta": rotation.theta,
            **(_PLAIN if scaling is None else scaling),
        }
    return fields


def _gemma3_layers(target: Target, engine: str) -> tuple[LayerRotation, dict[str, Any]]:
    """Return the rotation of Gemma 3's full attention, and the thetas under their own names."""
    if target.model_type != "gemma3_text":
        raise target.refuse(
            engine,
            f"how it reads the layer types of {target.model_type} is not known here; use vLLM or "
            "transformers",
        )
    rotation, windows = (target.rotations[name] for name in ("full_attention", "sliding_attention"))
    if windows.scaling != "default":
        raise target.refuse(
            engine, "windows take a theta there and no scaling; use ntk or abf for them"
        )
    fields: dict[str, Any] = {"rope_local_base_freq": windows.theta}
    if engine == NAME_VLM:
        fields["rope_global_base_freq"] = rotation.theta
    return rotation, fields


def _original_length_field(fields: dict[str, Any]) -> Any:
    inner = fields.get("rope_scaling") or {}
    return {**fields, **inner}.get("original_max_position_embeddings")


def _scaling(target: Target, rotation: LayerRotation, engine: str) -> dict[str, Any] | None:
    """Return `rope_scaling` of one rotation; None without a scaling."""
    scaling, parameters = rotation.scaling, rotation.parameters
    inv_freq = rotation.frequencies.inv_freq
    if scaling == "default":
        return None
    if scaling == "linear" and target.model_type != "phi3":
        return {"rope_type": "linear", "factor": parameters["factor"]}
    if target.is_mla:
        fields = latent_attention_fields(target, engine, rotation)
        return {key: value for key, value in fields.items() if key != "rope_theta"}
    if target.model_type != "phi3":
        if scaling == "llama3":
            return {k: v for k, v in parameters.items() if k != "rope_theta"}
        if scaling == "yarn" and parameters.get("truncate", True) and parameters["factor"] > 1:
            return _yarn_fields(rotation)
        # The share of `proportional` has the name of the share of a head that rotates at all.
        is_whole = "partial_rotary_factor" not in rotation.checkpoint_parameters
        is_own = config_rope_type(rotation.checkpoint_parameters) == "proportional"
        if scaling == "proportional" and (is_whole or is_own) and inv_freq.any():
            return _proportional_fields(rotation)
    return _longrope_fields(target, rotation, engine)


def _longrope_fields(target: Target, rotation: LayerRotation, engine: str) -> dict[str, Any]:
    """Return any rotation as one stretch for each pair."""
    if target.model_type == "gpt_oss":
        raise target.refuse(
            engine,
            "its gpt_oss takes no stretches pair by pair; use linear, ntk, abf, llama3 or yarn "
            "with truncate=True, on unscaled frequencies (start='unscaled')",
        )
    if not target.is_half_layout:
        raise target.refuse(
            engine,
            "its longrope, which could say it pair by pair, rotates halves of heads, and this "
            "model rotates neighbours; use linear, ntk, abf, llama3 or yarn",
        )
    factor, original = rotation.attention_factor, rotation.trained_length
    sets = {"long_factor": rotation.stretch, "short_factor": rotation.stretch}
    if engine == NAME_VLM and target.model_type not in _BY_LENGTHS:
        if rotation.has_temperature:
            original = rotation.checkpoint_parameters["original_max_position_embeddings"]
        mscales = {"short_mscale": factor, "long_mscale": factor}
        return {
            "rope_type": "longrope",
            **sets,
            **mscales,
            "original_max_position_embeddings": original,
        }
    if rotation.has_temperature:
        raise target.refuse(
            engine,
            "its longrope needs another original_max_position_embeddings than the checkpoint's, at "
            "which the queries' temperature begins; use yarn",
        )
    length = original_length_for_factor(target, engine, target.length, factor)
    name = "type" if target.model_type in _BY_LENGTHS else "rope_type"
    return {name: "longrope", **sets, "original_max_position_embeddings": float(length)}


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
