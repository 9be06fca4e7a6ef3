"""Saving a patched model so that plain transformers, and this package, load it back."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from rope_patch.patching import Patch, current
from rope_patch.patching.find import find_rotaries
from rope_patch.patching.rotary import unpatched
from rope_patch.versions import version

logger = logging.getLogger("rope_patch")

SIDECAR = "rope_patch.json"
_NEEDED = {"method", "options", "trained_length", "layer_types", "original"}


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a patched model: safetensors, a native config, and the sidecar `rope_patch.json`.

    Plain transformers loads the folder to the same logits where the method has a native form;
    where it has none a warning says so, and the sidecar's `native` is false. Dynamic methods other
    than `dynamic` have none: plain transformers then loads the unpatched model. Its own `dynamic`
    grows with every token and leaves cached keys behind, so it equals ours with growth="exact" in
    one pass, and never beyond the trained length with a cache. An interrupted save
    leaves what was in the folder before.

    Args:
        model: A patched model.
        folder: Where to; made if missing.

    Raises:
        ValueError: The model is not patched, or the folder is a file.
    """
    handle = current(model)
    if handle is None:
        raise ValueError(
            f"{type(model).__name__} is not patched: expected a model that rope_patch.patch or "
            "rope_patch.load returned; use model.save_pretrained for others"
        )
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder to save into")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        written = Path(temporary)
        model.save_pretrained(written)  # type: ignore[operator]
        native = _loads_natively(written, model, handle)
        (written / SIDECAR).write_text(json.dumps(_sidecar(handle, native), indent=2) + "\n")
        _move_into(written, folder)
    if not native:
        logger.warning(
            "%s: transformers %s has no form of its own for %s; load this folder with "
            "rope_patch.load",
            folder,
            version("transformers"),
            handle.method,
        )


def read_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `rope_patch.json` in a folder says, or None if there is none.

    Raises:
        ValueError: The file is damaged.
    """
    path = Path(folder) / SIDECAR
    if not path.is_file():
        return None
    try:
        sidecar = json.loads(path.read_text())
        if missing := _NEEDED - dict(sidecar).keys():
            raise ValueError(f"no {', '.join(sorted(missing))}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): save the model again") from error
    return sidecar


def _sidecar(handle: Patch, native: bool) -> dict[str, Any]:
    kinds = [kind for kind in handle.geometries if kind is not None]
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        "method": handle.method.name,
        "options": handle.method.options(),
        "trained_length": handle.trained_length,
        "length": handle.length,
        "layer_types": kinds or None,
        "native": native,
        "original": handle.original,
        "frequencies": {
            kind or "all": {
                "inv_freq": frequencies.inv_freq.tolist(),
                "attention_factor": frequencies.attention_factor,
            }
            for kind, frequencies in handle.frequencies.items()
        },
    }


def _loads_natively(folder: Path, model: nn.Module, handle: Patch) -> bool:
    """Whether transformers, given nothing but the folder, rotates as the patched model does."""
    if not (folder / "config.json").is_file():  # an adapter without its base
        return False
    if not handle.method.native:
        return False
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        for rotary in find_rotaries(model):
            for kind, plain in unpatched(rotary, config).items():
                if kind not in handle.geometries:
                    continue
                # What a module starts with: the short frequencies, where a method switches.
                geometry = handle.geometries[kind]
                ours = handle.method.frequencies(geometry, geometry.trained_length)
                if not ours.close_to(plain):
                    return False
    except (KeyError, ValueError, TypeError, AttributeError):
        return False
    return True


def _move_into(written: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    new = {path.name for path in written.iterdir()}
    # Weights first: what describes them must not be there before them.
    for path in sorted(written.iterdir(), key=lambda path: path.suffix == ".json"):
        if path.is_dir():
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    # An earlier save's weights would win over the new shards.
    for stale in folder.glob("model*.safetensors*"):
        if stale.name not in new:
            stale.unlink()
