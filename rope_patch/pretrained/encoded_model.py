"""Folders of models that `rope_patch.encode` gave another encoding.

`model-encoding.safetensors` holds the encoding's trained parts, and the sidecar its name and
options. The other weights are where plain transformers expects them, so it loads the folder as a
model of its class's own encoding, which is another model.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from rope_patch.extension import Extension
from rope_patch.patching import encode, patch
from rope_patch.patching.active import current
from rope_patch.patching.handle import Patch
from rope_patch.patching.replacement.handle import EncodedModel
from rope_patch.utils.errors import Refused, parse_json
from rope_patch.utils.versions import version

KIND = "encode"
WEIGHTS = "model-encoding.safetensors"
_SIDECAR = "rope_patch.json"
_TYPES: dict[str, Any] = {
    "encoding": str,
    "options": dict,
    "original": dict,
    "extension": dict | None,
}


def write_encoded(model: nn.Module, handle: EncodedModel, folder: Path) -> None:
    """Write an encoded model, its encoding's weights and the sidecar.

    Args:
        model: The model.
        handle: Its encoding.
        folder: An empty folder.

    Raises:
        ValueError: The model is wrapped by PEFT, whose folders hold no whole model.
    """
    if hasattr(model, "peft_config"):
        raise Refused(
            "an adapter's folder has no place for the trained parts of an encoding: merge the "
            "adapter first (model.merge_and_unload()), and save the whole model"
        )
    name = next(name for name, module in model.named_modules() if module is handle.encoding)
    state = model.state_dict()
    own = {key: value for key, value in state.items() if key.startswith(f"{name}.")}
    rest = {key: value for key, value in state.items() if key not in own}
    model.save_pretrained(folder, state_dict=rest)  # type: ignore[operator]
    if own:
        tensors = {
            key.removeprefix(f"{name}."): value.detach().contiguous().cpu()
            for key, value in own.items()
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    sidecar = _make_sidecar(model, handle)
    (folder / _SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")


def read_encoded(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the sidecar of an encoded model; None if a folder has none, or one of another kind.

    Raises:
        ValueError: The file is damaged.
    """
    path = Path(folder) / _SIDECAR
    if not path.is_file():
        return None
    try:
        sidecar = dict(parse_json(path.read_text()))
        if sidecar.get("kind") != KIND:
            return None
        for key, expected in _TYPES.items():
            if key not in sidecar or not isinstance(sidecar[key], expected):
                raise Refused(f"{key} is {sidecar.get(key, 'missing')!r:.60}")
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}): save the model again") from error
    return sidecar


def original_config(folder: str | os.PathLike[str], sidecar: dict[str, Any]) -> Any:
    """Return the config of an encoded model's folder from before it was encoded."""
    fields = parse_json((Path(folder) / "config.json").read_text())
    fields.get("text_config", fields).update(sidecar["original"])
    return AutoConfig.for_model(**fields)


def restore_encoded(
    model: nn.Module,
    sidecar: dict[str, Any],
    extension: Extension | None,
    folder: str | os.PathLike[str] | None = None,
) -> None:
    """Encode a model as a folder says, and extend it.

    Args:
        model: The model with the folder's other weights, or one without weights to check a request.
        sidecar: The folder's.
        extension: How to extend it, if at all.
        folder: Written by `rope_patch.save`, with the encoding's trained parts; None to leave those
            as drawn.

    Raises:
        ValueError: The trained parts are missing or of other sizes, or the request cannot be met.
    """
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced
        handle = encode(model, sidecar["encoding"], **sidecar["options"])
    if folder is not None:
        _load_weights(handle, Path(folder) / WEIGHTS)
    if extension is not None:
        patch(model, extension)


def _load_weights(handle: EncodedModel, path: Path) -> None:
    """Read an encoding's trained parts.

    Raises:
        ValueError: They are missing or of other sizes.
    """
    try:
        tensors = load_file(path) if path.is_file() else {}
        handle.encoding.load_state_dict(tensors)
    except Exception as error:  # safetensors has an error class of its own
        raise Refused(
            f"cannot load {path}: it lacks the trained parts of the encoding {handle.name!r}, or "
            f"they have other sizes ({error}); save the model again"
        ) from error


def _make_sidecar(model: nn.Module, handle: EncodedModel) -> dict[str, Any]:
    extended = current(model)
    options = dict(handle.options)
    if handle.name == "learned":  # the table is saved as it is, trained rows or stretched ones
        options["length"] = len(handle.encoding.get_parameter("table.weight"))
        extended = None
    original = dict(extended.original) if isinstance(extended, Patch) else {}
    original["rope_parameters"] = copy.deepcopy(handle.original_rope_parameters)
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        "kind": KIND,
        "encoding": handle.name,
        "options": options,
        "original": original,
        "extension": None if extended is None else extended.extension.to_dict(),
        "native": False,
    }
