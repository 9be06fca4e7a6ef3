"""SGLang: overrides of config.json.

Read from its code (srt/layers/rotary_embedding, models/gemma3_causal.py and utils/hf_transformers
of 0.5.23):

- YaRN's attention_factor is ignored; attn_factor multiplies the paper's factor.
- longrope reads short_mscale and long_mscale. At the position that equals the original length it
  reads a wrong row of cos and sin, so that length is set out of reach.
- `proportional` takes the share of rotating pairs from another field.
- Gemma 3 takes a theta for windows and passes the other fields to transformers' own functions.
- Gemma 4 takes a theta for each layer type, and a share of rotating pairs for full attention.
- DeepSeek-V4 takes a flat `rope_parameters`, in which its windows read the theta alone.
- Several positions a token (M-RoPE) take a theta or YaRN, without mscale.
- Newer releases merge an override of rope_parameters into the config's, and one of a nested config
  into that config. Older ones replace a nested config as a whole.
"""

from __future__ import annotations

import json
from typing import Any

from rope_patch.exporting import deepseek_v4
from rope_patch.exporting.engine_fields import require_fields_are_read
from rope_patch.exporting.target import Export, LayerRotation, Target, latent_attention_fields
from rope_patch.methods.ntk_by_parts import yarn_mscale

NAME = "sglang"
_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attn_factor": 1.0}


def export(target: Target) -> Export:
    """Return arguments for `python -m sglang.launch_server`.

    Raises:
        ValueError: SGLang has no form for the rotation.
    """
    target.require_static(NAME)
    rotations = target.rotations
    if target.model_type == deepseek_v4.MODEL_TYPE:
        all_parameters, extra = _deepseek_v4_fields(target)
    else:
        if target.model_type not in _GEMMA4:
            require_fields_are_read(target, NAME)
        all_parameters, extra = {k: _rope_fields(target, k, r) for k, r in rotations.items()}, {}
    fields = {
        "max_position_embeddings": target.length,
        **target.fields(all_parameters),
        **extra,
    }
    config = target.nest_fields(fields)
    notes = [
        "with the fields in config.json, --context-length is enough",
        "for releases that run on transformers 5; one on transformers 4 reads the fields that the "
        "engine transformers4 has",
    ]
    if target.text is not target.config:
        notes[0] += (
            "; write them there for older releases, which put those of the command line in the "
            "place of the whole text config"
        )
    if any("short_mscale" in p for p in all_parameters.values()):
        notes.append(
            "said pair by pair as longrope, with one set for short and long; "
            "original_max_position_embeddings is the target length there, so that SGLang never "
            "looks beyond the first set"
        )
    if target.model_type == "gemma3_text" and any(
        r.scaling != "default" for r in rotations.values()
    ):
        notes.append("on a CPU, SGLang takes the theta of Gemma 3 and no scaling")
    if target.model_type == deepseek_v4.MODEL_TYPE:
        notes.append(deepseek_v4.PUBLISHED_NOTE)
    return Export(
        engine=NAME,
        config=config,
        arguments=[
            "--json-model-override-args",
            json.dumps(config),
            "--context-length",
            str(target.length),
        ],
        notes=notes,
    )


def _rope_fields(target: Target, layer_type: str | None, rotation: LayerRotation) -> dict[str, Any]:
    parameters = dict(rotation.parameters)
    scaling = rotation.scaling
    if layer_type is not None:
        return _layer_fields(target, layer_type, rotation)
    if scaling == "default":
        return parameters
    if target.is_mla:
        return latent_attention_fields(target, NAME, rotation)
    if "mrope_section" in parameters:
        own_keys = parameters.keys() | rotation.checkpoint_parameters.keys()
        if scaling == "yarn" and not {"mscale", "mscale_all_dim"} & own_keys:
            return _yarn_fields(rotation)
        raise target.refuse(
            NAME,
            "for a model with several positions a token (M-RoPE) it reads a new theta, or YaRN "
            "without mscale; use ntk, abf or yarn",
        )
    if scaling == "yarn":
        return _yarn_fields(rotation)
    if scaling in ("linear", "llama3"):
        return parameters
    return _longrope_fields(target, rotation)


def _deepseek_v4_fields(
    target: Target,
) -> tuple[dict[str | None, dict[str, Any]], dict[str, float]]:
    """Return the flat parameters, and the theta of the compressed branches if it changes."""
    thetas, yarn = deepseek_v4.flat_fields(target, NAME)
    if yarn is None:  # its compressed branches read the original length in any case
        yarn = {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
        yarn["original_max_position_embeddings"] = target.length
    changed = deepseek_v4.changed_thetas(target)
    extra = {name: changed[name] for name in changed if name != "rope_theta"}
    return {None: {**yarn, "rope_theta": thetas["rope_theta"]}}, extra


def _longrope_fields(target: Target, rotation: LayerRotation) -> dict[str, Any]:
    if not target.is_half_layout:
        raise target.refuse(
            NAME,
            "its longrope, which could say it pair by pair, rotates halves of heads, and this "
            "model rotates neighbours; use linear, ntk, abf, llama3 or yarn",
        )
    if rotation.has_temperature:
        raise target.refuse(
            NAME,
            "its longrope needs another original_max_position_embeddings than the checkpoint's, at "
            "which the queries' temperature begins; use yarn",
        )
    factor = rotation.attention_factor
    return {
        **rotation.as_longrope(target.length),
        "original_max_position_embeddings": target.length,
        "short_mscale": factor,
        "long_mscale": factor,
    }


def _yarn_fields(rotation: LayerRotation) -> dict[str, Any]:
    parameters, checkpoint_parameters = dict(rotation.parameters), rotation.checkpoint_parameters
    default_factor = yarn_mscale(parameters["factor"])
    if rotation.attention_factor != default_factor:
        parameters["attention_factor"] = rotation.attention_factor
        parameters["attn_factor"] = rotation.attention_factor / default_factor
    # attn_factor sets the whole factor and would be multiplied by these.
    for key in ("mscale", "mscale_all_dim"):
        parameters.pop(key, None)
        if key in checkpoint_parameters:
            parameters[key] = None
    for key, value in _YARN_DEFAULTS.items():
        if key in checkpoint_parameters:
            parameters.setdefault(key, value)
    return parameters


def _layer_fields(target: Target, layer_type: str, rotation: LayerRotation) -> dict[str, Any]:
    """Return the fields of one layer type of Gemma 3 or Gemma 4."""
    if target.model_type not in ("gemma3_text", *_GEMMA4):
        raise target.refuse(
            NAME,
            f"how it reads the layer types of {target.model_type} is not known here; use vLLM or "
            "transformers",
        )
    if layer_type == "sliding_attention" and rotation.scaling != "default":
        raise target.refuse(
            NAME, "windows take a theta there and no scaling; use ntk or abf for them"
        )
    if target.model_type in _GEMMA4:
        return _gemma4_fields(target, layer_type, rotation)
    is_proportional = rotation.scaling == "proportional"  # unknown to transformers before 5.5
    return rotation.as_longrope(target.length) if is_proportional else rotation.parameters


def _gemma4_fields(target: Target, layer_type: str, rotation: LayerRotation) -> dict[str, Any]:
    """Return a theta, with the checkpoint's share of rotating pairs."""
    if rotation.scaling == "default":
        return rotation.parameters
    if (fields := rotation.as_proportional()) is not None:
        return fields
    raise target.refuse(
        NAME,
        f"its Gemma 4 reads of {layer_type} a theta and a share of rotating pairs, and no scaling; "
        "use ntk or abf",
    )
