"""SGLang: overrides of config.json.

Read from its code (srt/layers/rotary_embedding, models/gemma3_causal.py and utils/hf_transformers
of 0.5.23):

- YaRN's attention_factor is ignored; attn_factor multiplies the paper's factor.
- longrope reads short_mscale and long_mscale. At the position that equals the original length it
  reads a wrong row of cos and sin, so that length is set out of reach.
- `proportional` takes the share of rotating pairs from another field.
- Gemma 3 takes a theta for windows and passes the other fields to transformers' own functions.
- Newer releases merge an override of rope_parameters into the config's. Older ones replace a nested
  config as a whole.
"""

from __future__ import annotations

import json
from typing import Any

from rope_patch.exporting.engine_fields import require_fields_are_read
from rope_patch.exporting.target import Export, LayerRotation, Target
from rope_patch.exporting.vllm import is_deepseek_yarn
from rope_patch.methods.ntk_by_parts import yarn_mscale

NAME = "sglang"
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attn_factor": 1.0}


def export(target: Target) -> Export:
    """Return arguments for `python -m sglang.launch_server`.

    Raises:
        ValueError: SGLang has no form for the rotation.
    """
    target.require_static(NAME)
    require_fields_are_read(target, NAME)
    all_parameters = {k: _rope_fields(target, k, r) for k, r in target.rotations.items()}
    fields = {"max_position_embeddings": target.length, **target.fields(all_parameters)}
    nested = target.text is not target.config
    override = [] if nested else ["--json-model-override-args", json.dumps(fields)]
    notes = [
        "with the fields in config.json, --context-length is enough",
        "for releases that run on transformers 5; one on transformers 4 reads the fields that the "
        "engine transformers4 has",
    ]
    if nested:
        notes[0] = (
            "write the fields into config.json: SGLang's --json-model-override-args would put them "
            "in the place of the whole text config"
        )
    if any("short_mscale" in p for p in all_parameters.values()):
        notes.append(
            "said pair by pair as longrope, with one set for short and long; "
            "original_max_position_embeddings is the target length there, so that SGLang never "
            "looks beyond the first set"
        )
    if any(r.scaling != "default" for r in target.rotations.values()) and target.layers_differ:
        notes.append("on a CPU, SGLang takes the theta of Gemma 3 and no scaling")
    return Export(
        engine=NAME,
        config=target.nest_fields(fields),
        arguments=[*override, "--context-length", str(target.length)],
        notes=notes,
    )


def _rope_fields(target: Target, layer_type: str | None, rotation: LayerRotation) -> dict[str, Any]:
    parameters = dict(rotation.parameters)
    scaling = rotation.scaling
    if layer_type is not None:
        return _gemma3_layer_fields(target, layer_type, rotation)
    if scaling == "default":
        return parameters
    if target.is_mla:
        if scaling == "yarn" and is_deepseek_yarn(parameters):
            return parameters
        raise target.refuse(
            NAME,
            "multi-head latent attention takes there a new theta or YaRN with its own attention "
            "factor; use ntk, abf or yarn",
        )
    if "mrope_section" in parameters:
        if scaling == "yarn" and not {"attention_factor", "mscale"} & parameters.keys():
            return parameters
        raise target.refuse(
            NAME,
            "for a model with several positions a token (M-RoPE) it reads a new theta, or YaRN "
            "with its own attention factor; use ntk, abf or yarn",
        )
    if scaling == "yarn":
        return _yarn_fields(rotation)
    if scaling in ("linear", "llama3"):
        return parameters
    return _longrope_fields(target, rotation)


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


def _gemma3_layer_fields(
    target: Target, layer_type: str, rotation: LayerRotation
) -> dict[str, Any]:
    if target.model_type != "gemma3_text":
        raise target.refuse(
            NAME,
            f"how it reads the layer types of {target.model_type} is not known here; use vLLM or "
            "transformers",
        )
    if layer_type == "sliding_attention" and rotation.scaling != "default":
        raise target.refuse(
            NAME, "windows take a theta there and no scaling; use ntk or abf for them"
        )
    is_proportional = rotation.scaling == "proportional"  # unknown to transformers before 5.5
    return rotation.as_longrope(target.length) if is_proportional else rotation.parameters
