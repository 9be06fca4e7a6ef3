"""transformers, 5 and 4: fields of config.json.

Version 4 as modeling_rope_utils.py of 4.57.6 reads it: `rope_scaling` beside a separate
`rope_theta`, no `proportional`, and for Gemma 3 a `rope_local_base_freq` beside them. For Phi-3
`rope_scaling` holds only the stretches, so its attention factor comes from two lengths. Its model
files differ, and docs/generate/transformers4_fields.py runs them:

- GPT-NeoX takes its theta as `rotary_emb_base`, and its share of rotating pairs as `rotary_pct`.
- OLMo and OLMo 2 take `type` and `factor` alone. Llama 4 takes any `rope_scaling` for Llama 3's.
- Mixtral and MiniMax multiply by a `head_dim` that their configs leave out.
- Qwen3-VL fails without a `rope_scaling`, and GLM-4V with the `type` that Qwen2-VL needs.
- DeepSeek-V2 leaves YaRN's attention factor out of its softmax scale; Nemotron ignores scalings.
"""

from __future__ import annotations

import copy
from typing import Any

from rope_patch.exporting.engine_fields import require_fields_are_read
from rope_patch.exporting.target import (
    STATIC_ALTERNATIVE,
    Export,
    LayerRotation,
    Target,
    original_length_for_factor,
)
from rope_patch.patching.architecture.rotary_traits import reference_frequencies
from rope_patch.rope_config import config_rope_type

NAME, NAME_V4 = "transformers", "transformers4"

_SIDECAR_ADVICE = (
    "save the model with rope_patch.save and load it with rope_patch.load, or use yarn"
)
_GEMMA3 = ("gemma3_text",)
# Keys that transformers 4 has beside rope_scaling, not in it.
_OUTER_KEYS = ("rope_theta", "partial_rotary_factor")
_GPT_NEOX_KEYS = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_OUTER_NAMES = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), _GPT_NEOX_KEYS)
_TYPE_AND_FACTOR = ("olmo", "olmo2")
_THREE_FIELDS = ("phi3", "phi4_multimodal")
_MROPE_TYPE = ("qwen2_vl_text", "qwen2_5_vl_text")
_NEEDS_HEAD_DIM = ("mixtral", "minimax")
_NEEDS_SCALING = ("qwen3_vl_text", "qwen3_vl_moe_text")


def export(target: Target) -> Export:
    """Return the fields for transformers 5.

    Raises:
        ValueError: No config says the rotation.
    """
    target.require_config_form(NAME, _SIDECAR_ADVICE)
    all_parameters = {
        layer_type: _rope_fields(target, rotation)
        for layer_type, rotation in target.rotations.items()
    }
    target.require_valid(NAME, all_parameters)
    fields = {"max_position_embeddings": _positions(target), **target.fields(all_parameters)}
    _require_fields_act(target, fields)
    return Export(engine=NAME, config=target.nest_fields(fields), notes=_dynamic_notes(target))


def _require_fields_act(target: Target, fields: dict[str, Any]) -> None:
    """Raise if a rotary module of the checkpoint's own code does not rotate by the fields."""
    rotary = target.traits.rotary
    if type(rotary.module).__module__.startswith("transformers."):
        return
    config = copy.deepcopy(target.text)
    for name, value in fields.items():
        setattr(config, name, copy.deepcopy(value))
    for layer_type, plain in reference_frequencies(rotary, config).items():
        ours = target.rotations[layer_type].frequencies
        if target.method is not None and layer_type in target.geometries:
            ours = target.method.frequencies_at(target.geometries[layer_type], 1)
        if not ours.close_to(plain):
            raise target.refuse(
                NAME,
                f"{type(rotary.module).__name__}, which is no class of transformers, does not "
                f"rotate by what its config says; {_SIDECAR_ADVICE.removesuffix(', or use yarn')}",
            )


def _rope_fields(target: Target, rotation: LayerRotation) -> dict[str, Any]:
    """Return parameters without `proportional`, new in 5.5, unless the checkpoint has it."""
    if rotation.scaling == "longrope" and (fields := rotation.as_proportional()) is not None:
        return fields
    is_new = rotation.scaling == "proportional" != config_rope_type(rotation.checkpoint_parameters)
    return rotation.as_longrope(target.length) if is_new else rotation.parameters


def export_v4(target: Target) -> Export:
    """Return the fields for transformers 4.

    Raises:
        ValueError: Its configs have no form for the rotation.
    """
    target.require_config_form(NAME_V4, _SIDECAR_ADVICE)
    require_fields_are_read(target, NAME_V4)
    rotation = target.rotations.get(None)
    fields = _gemma3_fields(target) if rotation is None else _v4_fields(target, rotation)
    return Export(
        engine=NAME_V4,
        config=target.nest_fields({"max_position_embeddings": _positions(target), **fields}),
        notes=[
            "for a config.json without rope_parameters, which transformers 5 writes and 4 ignores",
            *_dynamic_notes(target),
        ],
    )


def _positions(target: Target) -> int:
    """Return `max_position_embeddings`, which is the trained length for `dynamic`."""
    dynamic = [r for r in target.rotations.values() if r.scaling == "dynamic"]
    return dynamic[0].trained_length if dynamic else target.length


def _dynamic_notes(target: Target) -> list[str]:
    if not target.is_length_dependent:
        return []
    return [
        "transformers changes the rotation with the longest sequence of a batch and leaves keys "
        "behind that are cached already: equal to rope_patch in one pass, and not while generating "
        "across a change"
        + (
            "; its dynamic grows with every token, as ours does with growth='exact'"
            if any(r.scaling == "dynamic" for r in target.rotations.values())
            else ""
        )
    ]


def _v4_fields(target: Target, rotation: LayerRotation) -> dict[str, Any]:
    parameters = dict(rotation.parameters)
    if rotation.scaling == "proportional":
        parameters = rotation.as_longrope(target.length)
    names = _OUTER_NAMES.get(target.model_type, {})
    fields = {names.get(k, k): parameters.pop(k) for k in _OUTER_KEYS if k in parameters}
    if target.model_type in _THREE_FIELDS:
        return {**fields, **_phi3_fields(target, rotation, parameters)}
    if target.is_mla and rotation.scaling not in ("default", "yarn"):
        raise target.refuse(
            NAME_V4,
            "multi-head latent attention takes there a new theta or YaRN; use ntk, abf or yarn",
        )
    if "mrope_section" in parameters:
        if rotation.scaling != "default":
            raise target.refuse(
                NAME_V4, "M-RoPE takes no scaling there, only a new theta; use ntk or abf"
            )
        if target.model_type in _MROPE_TYPE:
            parameters["type"] = "mrope"
        else:
            parameters.pop("type", None)
    elif rotation.scaling == "default" and target.model_type not in _NEEDS_SCALING:
        return {**fields, "rope_scaling": None}
    elif target.model_type in _TYPE_AND_FACTOR:
        if rotation.scaling != "linear":
            raise target.refuse(
                NAME_V4, f"{target.model_type} takes linear there and no other scaling; use linear"
            )
        parameters = {"type": "linear", "factor": parameters["factor"]}
        return {**fields, "rope_scaling": parameters}
    elif target.model_type == "llama4_text" and rotation.scaling != "llama3":
        raise target.refuse(
            NAME_V4, "Llama 4 takes llama3 there and no other scaling; use llama3, ntk or abf"
        )
    if parameters["rope_type"] == "longrope":
        original = parameters["original_max_position_embeddings"]
        if target.is_length_dependent or getattr(
            target.text, "original_max_position_embeddings", None
        ):
            fields["original_max_position_embeddings"] = original
    if target.model_type in _NEEDS_HEAD_DIM:
        text = target.text
        fields["head_dim"] = text.head_dim or text.hidden_size // text.num_attention_heads
    return {**fields, "rope_scaling": parameters}


def _phi3_fields(
    target: Target, rotation: LayerRotation, parameters: dict[str, Any]
) -> dict[str, Any]:
    if rotation.scaling == "default":
        return {"rope_scaling": None}
    original = parameters["original_max_position_embeddings"]
    if not target.is_length_dependent:
        original = _original_length_for(target, rotation)
    elif abs(_original_length_for(target, rotation) / original - 1) > 1e-6:
        raise target.refuse(
            NAME_V4,
            "Phi-3's attention factor comes from the two lengths there, and is another; "
            + STATIC_ALTERNATIVE,
        )
    names = {"type": "longrope"} | {k: parameters[k] for k in ("short_factor", "long_factor")}
    return {"rope_scaling": names, "original_max_position_embeddings": original}


def _original_length_for(target: Target, rotation: LayerRotation) -> float:
    return original_length_for_factor(target, NAME_V4, target.length, rotation.attention_factor)


def _gemma3_fields(target: Target) -> dict[str, Any]:
    windows, rest = (target.rotations.get(k) for k in ("sliding_attention", "full_attention"))
    if target.model_type not in _GEMMA3 or windows is None or rest is None:
        raise target.refuse(
            NAME_V4,
            f"it has no fields for the layer types of {target.model_type} that are known here; "
            "use transformers 5",
        )
    if windows.scaling != "default":
        raise target.refuse(
            NAME_V4, "windows take a theta there and no scaling; use ntk or abf for them"
        )
    return {**_v4_fields(target, rest), "rope_local_base_freq": windows.theta}
