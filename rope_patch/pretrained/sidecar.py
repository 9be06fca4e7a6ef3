"""The sidecar `rope_patch.json`, which says beside a model or an adapter how it is patched."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rope_patch.extension import Extension
from rope_patch.methods.registry import find_method
from rope_patch.original_config import TRAINED
from rope_patch.patching import Patch
from rope_patch.patching.encodings.handle import EncodingPatch
from rope_patch.pretrained.encoded_model import KIND
from rope_patch.pretrained.encoding_checkpoint import encoding_sidecar
from rope_patch.pretrained.recorded_rotation import (
    OUTSIDE,
    is_missing,
    outside_record,
    recorded_extension,
)
from rope_patch.utils.errors import Refused, parse_json
from rope_patch.utils.versions import version

SIDECAR = "rope_patch.json"
_TYPES: dict[str, Any] = {
    "method": str,
    "options": dict,
    "original": dict,
    "trained_length": int | None,
    "layer_types": list | None,
}
_NEW_TYPES: dict[str, Any] = {  # rope_patch 0.1 has the factor among the options
    "factor": float | int | None,
    "length": int | None,
    "start": str,
    OUTSIDE: dict,  # methods that are not ours
    TRAINED: dict | bool,
}


def read_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the sidecar `rope_patch.json` of a folder; None if there is none.

    Raises:
        ValueError: The file is damaged, or of an encoded model.
    """
    path = Path(folder) / SIDECAR
    if not path.is_file():
        return None
    try:
        sidecar = dict(parse_json(path.read_text()))
        if sidecar.get("kind") != KIND:
            _require_fields(sidecar)
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}): save the model again") from error
    if sidecar.get("kind") == KIND:
        raise Refused(
            f"{folder} holds a model with another encoding (rope_patch.encode), which only "
            "rope_patch.load reads: expected a model with the encoding of its class; call the "
            "function of rope_patch with the model that load returns, where it takes one"
        )
    return sidecar


def _require_fields(sidecar: dict[str, Any]) -> None:
    """Raise unless a sidecar has all its fields, of their types."""
    if missing := _TYPES.keys() - sidecar.keys():
        raise Refused(f"no {', '.join(sorted(missing))}")
    for key, expected_type in (_TYPES | _NEW_TYPES).items():
        if key in sidecar and not isinstance(sidecar[key], expected_type):
            raise Refused(f"{key} is {sidecar[key]!r:.60}")
    if "factor" not in {*sidecar, *sidecar["options"]}:
        raise Refused("no factor among its options")


def extension_from_sidecar(sidecar: dict[str, Any]) -> Extension:
    """Return the request that restores the patch of a sidecar.

    That is by its recorded frequencies, with a warning, if the method is not ours and not known
    here.

    Raises:
        ValueError: The recorded frequencies are not all that such a method did.
    """
    if is_missing(sidecar):
        return recorded_extension(sidecar)
    request = {f.name: sidecar[f.name] for f in fields(Extension) if f.name in sidecar}
    if "factor" not in request:  # of rope_patch 0.1, with the length that the factor led to
        options = dict(sidecar["options"])
        factor, length = options.pop("factor"), request.pop("length", None)
        method_class = find_method(sidecar["method"])
        if method_class is not None and method_class.is_dynamic:
            request["length"] = length
            factor = factor if method_class.factor_is_option else None
        if sidecar["method"] == "nope":  # 0.1 scaled cos and sin by the length of the whole text
            options.pop("growth", None)
            if coefficient := options.pop("temperature", 0):
                options["temperature"] = f"drope:{coefficient}"
        request |= {"factor": factor, "options": options}
    return Extension(**request)


def sidecar_target(sidecar: dict[str, Any]) -> int | None:
    """Return the target length of a sidecar's patch in tokens, or None if it has none."""
    return sidecar.get("target_length", sidecar.get("length"))


def patch_to_restore(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the sidecar of a folder whose patch only `load` restores or takes off; else None.

    A folder whose weights were trained under the rotation that its config states is a checkpoint
    like any other: transformers loads it as it was trained, and extensions start from there.

    Raises:
        ValueError: See `read_sidecar`.
    """
    sidecar = read_sidecar(folder)
    trained = {} if sidecar is None else sidecar.get(TRAINED)
    if isinstance(trained, dict) and trained.get("rope_parameters"):
        return None
    return sidecar


def make_sidecar(
    handle: Patch | EncodingPatch, native: bool, trained: dict[str, Any] | bool = False
) -> dict[str, Any]:
    """Return the sidecar of a patched model.

    Args:
        handle: The patch.
        native: Whether plain transformers loads the folder to the same logits.
        trained: The rotation that the weights were trained under (`trained_part`); False if they
            were not.
    """
    if isinstance(handle, EncodingPatch):
        return encoding_sidecar(handle, native)
    # The kernels are for the machine at hand, not for the one that loads the folder.
    extension = replace(handle.extension, kernels="auto")
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        **extension.to_dict(),
        "target_length": handle.length,
        "sharpening": handle.softmax_mscale,
        "native": native,
        **outside_record(handle),
        "original": handle.original,
        TRAINED: trained,
        "frequencies": {
            layer_type or "all": {
                "inv_freq": frequencies.inv_freq.tolist(),
                "attention_factor": frequencies.attention_factor,
            }
            for layer_type, frequencies in handle.frequencies.items()
        },
    }
