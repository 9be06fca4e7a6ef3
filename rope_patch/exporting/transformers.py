"""transformers, 5 and 4: fields of config.json.

4 as modeling_rope_utils.py of 4.57.6 reads them: `rope_scaling` beside a `rope_theta` of its own,
no `proportional`, for Gemma 3 a `rope_local_base_freq` beside them, and for Phi-3 nothing in
`rope_scaling` but the stretches, so that its attention factor comes from two lengths.
"""

from __future__ import annotations

from typing import Any

from rope_patch.exporting.longrope_length import pretended_length
from rope_patch.exporting.result import Export
from rope_patch.exporting.rotation import Rotation
from rope_patch.exporting.target import INSTEAD, Target
from rope_patch.rope_config import own_scaling

NAME, OLD = "transformers", "transformers4"

_SIDECAR = "save the model with rope_patch.save and load it with rope_patch.load, or use yarn"
_GEMMA3 = ("gemma3_text",)
_OUTER = ("rope_theta", "partial_rotary_factor")  # what transformers 4 has beside rope_scaling


def export(target: Target) -> Export:
    """The fields for transformers 5.

    Raises:
        ValueError: No config says the rotation.
    """
    target.require_form(NAME, _SIDECAR)
    spelled = {kind: _spell(target, rotation) for kind, rotation in target.rotations.items()}
    fields = {"max_position_embeddings": _positions(target), **target.fields(spelled)}
    return Export(engine=NAME, config=target.nested(fields), notes=_following(target))


def _spell(target: Target, rotation: Rotation) -> dict[str, Any]:
    """Without `proportional`, which 5.5 was the first to know, unless the model needs that."""
    news = rotation.scaling == "proportional" != own_scaling(rotation.standing)
    return rotation.explicit(target.length) if news else rotation.parameters


def export_old(target: Target) -> Export:
    """The fields for transformers 4.

    Raises:
        ValueError: Its configs have no form for the rotation.
    """
    target.require_form(OLD, _SIDECAR)
    alike = target.rotations.get(None)
    fields = _gemma3(target) if alike is None else _old(target, alike)
    return Export(
        engine=OLD,
        config=target.nested({"max_position_embeddings": _positions(target), **fields}),
        notes=[
            "for a config.json without rope_parameters, which transformers 5 writes and 4 ignores",
            *_following(target),
        ],
    )


def _positions(target: Target) -> int:
    """`max_position_embeddings`, which `dynamic` takes for the trained length."""
    dynamic = [r for r in target.rotations.values() if r.scaling == "dynamic"]
    return dynamic[0].trained_length if dynamic else target.length


def _following(target: Target) -> list[str]:
    if not target.follows:
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


def _old(target: Target, rotation: Rotation) -> dict[str, Any]:
    parameters = dict(rotation.parameters)
    if rotation.scaling == "proportional":
        parameters = rotation.explicit(target.length)
    fields = {key: parameters.pop(key) for key in _OUTER if key in parameters}
    if target.model_type == "phi3":
        return {**fields, **_phi3(target, rotation, parameters)}
    if target.latent and rotation.scaling not in ("default", "yarn"):
        raise target.refuse(
            OLD,
            "multi-head latent attention takes there a new theta or YaRN; use ntk, abf or yarn",
        )
    if rotation.scaling == "default" and "mrope_section" not in parameters:
        return {**fields, "rope_scaling": None}
    if "mrope_section" in parameters:
        if rotation.scaling != "default":
            raise target.refuse(
                OLD, "M-RoPE takes no scaling there, only a new theta; use ntk or abf"
            )
        parameters["type"] = "mrope"
    if parameters["rope_type"] == "longrope":
        original = parameters["original_max_position_embeddings"]
        if target.follows or getattr(target.text, "original_max_position_embeddings", None):
            fields["original_max_position_embeddings"] = original
    return {**fields, "rope_scaling": parameters}


def _phi3(target: Target, rotation: Rotation, parameters: dict[str, Any]) -> dict[str, Any]:
    if rotation.scaling == "default":
        return {"rope_scaling": None}
    original = parameters["original_max_position_embeddings"]
    if not target.follows:
        original = _pretended(target, rotation)
    elif abs(_pretended(target, rotation) / original - 1) > 1e-6:
        raise target.refuse(
            OLD,
            "Phi-3's attention factor comes from the two lengths there, and is another; " + INSTEAD,
        )
    names = {"type": "longrope"} | {k: parameters[k] for k in ("short_factor", "long_factor")}
    return {"rope_scaling": names, "original_max_position_embeddings": original}


def _pretended(target: Target, rotation: Rotation) -> float:
    return pretended_length(target, OLD, target.length, rotation.attention_factor)


def _gemma3(target: Target) -> dict[str, Any]:
    windows, rest = (target.rotations.get(k) for k in ("sliding_attention", "full_attention"))
    if target.model_type not in _GEMMA3 or windows is None or rest is None:
        raise target.refuse(
            OLD,
            f"it has no fields for the layer types of {target.model_type} that are known here; "
            "use transformers 5",
        )
    if windows.scaling != "default":
        raise target.refuse(
            OLD, "windows take a theta there and no scaling; use ntk or abf for them"
        )
    return {**_old(target, rest), "rope_local_base_freq": windows.theta}
