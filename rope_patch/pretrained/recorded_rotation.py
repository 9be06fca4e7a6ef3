"""The rotation that a sidecar records, for methods that are not ours.

Such a method may be missing where its folder is loaded, or compute other numbers there. So its
sidecar names its origin under `outside`, and its recorded frequencies are the truth.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from rope_patch.extension import Extension
from rope_patch.methods import Frequencies
from rope_patch.methods.base import Rotation
from rope_patch.methods.origin import Origin
from rope_patch.methods.recorded import Recorded
from rope_patch.methods.registry import find_method
from rope_patch.patching import Patch
from rope_patch.patching.method_wrappers import method_origin
from rope_patch.patching.plan import PatchPlan
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

OUTSIDE = "outside"


def outside_record(handle: Patch) -> dict[str, Any]:
    """Return what a sidecar says of a patch's method if it is not ours; else nothing."""
    origin = method_origin(handle.method)
    if not isinstance(origin, Origin):  # ours, or recorded already
        return {}
    record = {
        **origin.to_dict(),
        "follows_length": handle.is_length_dependent,
        "start_tokens": handle.method.start_token_count,
    }
    return {OUTSIDE: record}


def describe_outside(sidecar: dict[str, Any]) -> str:
    """Return where a sidecar's method was from; empty for ours."""
    if sidecar["method"] == Recorded.name:
        return str(sidecar["options"].get("origin", ""))
    names = ("package", "version", "file", "digest")
    record = sidecar.get(OUTSIDE)
    return "" if record is None else str(Origin(*(record.get(name) for name in names)))


def is_missing(sidecar: dict[str, Any]) -> bool:
    """Return whether a sidecar's method came from outside and is not known here."""
    return OUTSIDE in sidecar and find_method(sidecar["method"]) is None


def recorded_extension(sidecar: dict[str, Any]) -> Extension:
    """Return the request that restores a sidecar's patch from its recorded frequencies.

    Raises:
        ValueError: They are not all that the method did.
    """
    method, record, origin = sidecar["method"], sidecar[OUTSIDE], describe_outside(sidecar)
    try:
        follows_length, start_tokens = record["follows_length"], record["start_tokens"]
        if type(start_tokens) is not int or start_tokens < 0:
            raise ValueError(f"start_tokens must be a whole number from 0 on, got {start_tokens!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"rope_patch.json is damaged ({OUTSIDE}: {error!r}): save the model again"
        ) from error
    if follows_length or (start_tokens and sidecar["start"] == "running"):
        why = "follows the length" if follows_length else "keeps a rotation for its first tokens"
        raise Refused(
            f"the model was saved with {method!r} of {origin}, which is not loaded here and {why}, "
            "so that the recorded frequencies are not all of it: install the package, or import "
            "the file first (rope_patch.methods.load_plugin, or --plugin)"
        )
    logger.warning(
        "%r of %s is not loaded here: the model rotates by the frequencies that rope_patch.json "
        "records",
        method,
        origin,
    )
    # In latent attention, the attention factor is in the softmax scale.
    in_softmax = sidecar.get("sharpening", 1.0)
    layers = {
        layer_type or "all": {
            "inv_freq": frequencies.inv_freq.tolist(),
            "attention_factor": in_softmax if in_softmax != 1 else frequencies.attention_factor,
        }
        for layer_type, frequencies in sidecar_frequencies(sidecar).items()
    }
    return Extension(
        Recorded.name,
        factor=sidecar["factor"],
        length=sidecar["length"],
        trained_length=sidecar["trained_length"],
        layer_types=sidecar["layer_types"],
        start="unscaled",  # the recorded numbers need nothing to start from
        options={
            "saved_method": method,
            "origin": origin,
            "layers": layers,
            "start_tokens": start_tokens,
        },
    )


def require_recorded(plan: PatchPlan, sidecar: dict[str, Any]) -> None:
    """Raise if a method from outside computes other numbers than when the folder was saved.

    Raises:
        ValueError: It does, at the target length.
    """
    if OUTSIDE not in sidecar:
        return
    recorded = Rotation(sidecar_frequencies(sidecar), sidecar.get("sharpening", 1.0))
    if recorded.close_to(Rotation(plan.frequencies(), plan.softmax_mscale)):
        return
    raise Refused(
        f"{plan.method.name!r} computes other frequencies here than {sidecar['method']!r} did when "
        "the model was saved, which rope_patch.json records: load it with the method as it was, or "
        "without the plugin, by the recorded frequencies; or name a method"
    )


def sidecar_frequencies(sidecar: dict[str, Any]) -> dict[str | None, Frequencies]:
    """Return the frequencies of each layer type that a sidecar records.

    Raises:
        ValueError: They are damaged.
    """
    try:
        return {
            None if layer_type == "all" else layer_type: Frequencies(
                torch.tensor(entry["inv_freq"], dtype=torch.float64), entry["attention_factor"]
            )
            for layer_type, entry in sidecar["frequencies"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"the frequencies in rope_patch.json are damaged ({error!r}): save it again"
        ) from error
