"""transformers, 5 and 4: fields of config.json.

Version 4 as modeling_rope_utils.py of 4.57.6 reads it: `rope_scaling` beside a separate
`rope_theta`, no `proportional`, and for Gemma 3 a `rope_local_base_freq` beside them. For Phi-3
`rope_scaling` holds only the stretches, so its attention factor comes from two lengths.
"""

from __future__ import annotations

from typing import Any

from rope_patch.exporting.longrope_length import original_length_for_factor
from rope_patch.exporting.result import Export
from rope_patch.exporting.rotation import LayerRotation
from rope_patch.exporting.target import STATIC_ALTERNATIVE, Target
from rope_patch.rope_config import config_rope_type

NAME, NAME_V4 = "transformers", "transformers4"

_SIDECAR_ADVICE = (
    "save the model with rope_patch.save and load it with rope_patch.load, or use yarn"
)
_GEMMA3 = ("gemma3_text",)
_OUTER_KEYS = ("rope_theta", "partial_rotary_factor")  # beside rope_scaling in transformers 4


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
    fields = {"max_position_embeddings": _positions(target), **target.fields(all_parameters)}
    return Export(engine=NAME, config=target.nest_fields(fields), notes=_dynamic_notes(target))


def _rope_fields(target: Target, rotation: LayerRotation) -> dict[str, Any]:
    """Return parameters without `proportional`, new in 5.5, unless the checkpoint has it."""
    is_new = rotation.scaling == "proportional" != config_rope_type(rotation.checkpoint_parameters)
    return rotation.as_longrope(target.length) if is_new else rotation.parameters


def export_v4(target: Target) -> Export:
    """Return the fields for transformers 4.

    Raises:
        ValueError: Its configs have no form for the rotation.
    """
    target.require_config_form(NAME_V4, _SIDECAR_ADVICE)
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
    fields = {key: parameters.pop(key) for key in _OUTER_KEYS if key in parameters}
    if target.model_type == "phi3":
        return {**fields, **_phi3_fields(target, rotation, parameters)}
    if target.is_mla and rotation.scaling not in ("default", "yarn"):
        raise target.refuse(
            NAME_V4,
            "multi-head latent attention takes there a new theta or YaRN; use ntk, abf or yarn",
        )
    if rotation.scaling == "default" and "mrope_section" not in parameters:
        return {**fields, "rope_scaling": None}
    if "mrope_section" in parameters:
        if rotation.scaling != "default":
            raise target.refuse(
                NAME_V4, "M-RoPE takes no scaling there, only a new theta; use ntk or abf"
            )
        parameters["type"] = "mrope"
    if parameters["rope_type"] == "longrope":
        original = parameters["original_max_position_embeddings"]
        if target.is_length_dependent or getattr(
            target.text, "original_max_position_embeddings", None
        ):
            fields["original_max_position_embeddings"] = original
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
