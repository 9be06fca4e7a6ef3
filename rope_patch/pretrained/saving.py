"""Saving a patched model so that plain transformers, and this package, load it back."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig

from rope_patch.methods import registered_methods
from rope_patch.patching import Patch, current
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.mla_scale import config_mscale
from rope_patch.pretrained.transformers_registry import to_native_rope_parameters
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import describe_error, parse_json
from rope_patch.utils.versions import version

logger = logging.getLogger("rope_patch")

# What transformers raises for a config that it cannot read.
_CONFIG_ERRORS = (KeyError, ValueError, TypeError, AttributeError)
SIDECAR = "rope_patch.json"
ADAPTER_CONFIG = "adapter_config.json"
_DISK_ADVICE = "What was in the folder before is still there: REMEDY, and save again"
_SIDECAR_TYPES: dict[str, Any] = {
    "method": str,
    "options": dict,
    "original": dict,
    "trained_length": int | None,
    "layer_types": list | None,
}


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a patched model: safetensors, a native config, and the sidecar `rope_patch.json`.

    Plain transformers loads the folder to the same logits, to float32 rounding (it computes
    frequencies in float32), where the method has a native form;
    where it has none a warning says so, and the sidecar's `has_config_form` is false. Dynamic
    methods other than `dynamic` have none: plain transformers then loads the unpatched model. Its
    own `dynamic` grows with every token and leaves cached keys behind, so it equals ours with
    growth="buffers" in one pass, and never beyond the trained length with a cache. An interrupted
    save leaves what was in the folder before.

    Of a PEFT model the adapter is written, and beside it the sidecar, so that `load` and
    `load_adapter` know under which rotation it was trained.

    Args:
        model: A patched model.
        folder: Where to; made if missing.

    Raises:
        ValueError: The model is not patched, the folder is a file, or an adapter would lie beside a
            whole model.
        OSError: It could not be written; says where and how to go on.
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
    with atomic_files.explain_write_errors(folder.parent, folder.name, _DISK_ADVICE):
        adapters, native, problem = _write_folder(model, handle, folder)
    if adapters:
        logger.info(
            "%s: an adapter for a base patched with %s; load it with rope_patch.load or "
            "rope_patch.load_adapter, as PEFT alone patches nothing",
            folder,
            handle,
        )
    elif problem:
        logger.warning(
            "%s: plain transformers %s cannot load this folder at all (%s), and neither can "
            "releases before it; load it with rope_patch.load%s",
            folder,
            version("transformers"),
            problem,
            _release_hint(handle),
        )
    elif not native:
        logger.warning(
            "%s: transformers %s has no form of its own for %s; load this folder with "
            "rope_patch.load",
            folder,
            version("transformers"),
            handle.method,
        )


def _write_folder(
    model: nn.Module, handle: Patch, folder: Path
) -> tuple[list[Path], bool, str | None]:
    """Write a patched model.

    Returns:
        Its adapters, whether plain transformers loads it to the same logits, and why it cannot load
        it at all, if so.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        written = Path(temporary)
        model.save_pretrained(written)  # type: ignore[operator]
        adapters = [path.parent for path in written.rglob(ADAPTER_CONFIG)]
        _refuse_adapter_beside_model(folder, adapters)
        if not adapters:
            _write_native_rope_type(written / "config.json", model)
        problem = None if adapters else _loading_problem(written, model)
        native = not adapters and not problem and _loads_natively(written, model, handle)
        sidecar = _make_sidecar(handle, native)
        if adapters:
            sidecar["base_model"] = getattr(_text_config(model), "name_or_path", None) or None
        for place in {written, *adapters}:
            (place / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")
        _replace_files(written, folder)
    return adapters, native, problem


def read_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `rope_patch.json` in a folder says, or None if there is none.

    Raises:
        ValueError: The file is damaged.
    """
    path = Path(folder) / SIDECAR
    if not path.is_file():
        return None
    try:
        sidecar = parse_json(path.read_text())
        if missing := _SIDECAR_TYPES.keys() - dict(sidecar).keys():
            raise ValueError(f"no {', '.join(sorted(missing))}")
        for key, kind in _SIDECAR_TYPES.items():
            if not isinstance(sidecar[key], kind):
                raise ValueError(f"{key} is {sidecar[key]!r:.60}")
        if "factor" not in sidecar["options"]:
            raise ValueError("no factor among its options")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): save the model again") from error
    return sidecar


def request_from_sidecar(sidecar: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `patch` that bring back what a sidecar records."""
    options = dict(sidecar["options"])
    request = {
        "method": sidecar["method"],
        "factor": options.pop("factor"),
        "length": None,
        "trained_length": sidecar["trained_length"],
        "layer_types": sidecar["layer_types"],
        "start": sidecar.get("start", "auto"),
    }
    kind = registered_methods().get(sidecar["method"])
    if kind is not None and kind.is_dynamic:
        request["length"] = sidecar.get("length")
        if not kind.factor_is_option:
            request["factor"] = None
    return request | options


def _make_sidecar(handle: Patch, native: bool) -> dict[str, Any]:
    kinds = [kind for kind in handle.geometries if kind is not None]
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        "method": handle.method.name,
        "options": handle.method.options(),
        "trained_length": handle.trained_length,
        "length": handle.length,
        "layer_types": kinds or None,
        "start": "running" if any(g.base for g in handle.geometries.values()) else "unscaled",
        "sharpening": handle.softmax_mscale,
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
    if not handle.method.has_config_form:
        return False
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        for rotary in find_rotaries(model):
            for kind, plain in reference_frequencies(rotary, config).items():
                if kind not in handle.geometries:
                    continue
                # What a module starts with: the short frequencies, where a method switches.
                geometry = handle.geometries[kind]
                ours = handle.method.frequencies_at(geometry, 1)
                if not ours.close_to(plain):
                    return False
        for attention in handle.mla_attentions:
            if abs(config_mscale(attention, config) - handle.softmax_mscale) > 1e-6:
                return False
    except _CONFIG_ERRORS:
        return False
    return True


def _loading_problem(folder: Path, model: nn.Module) -> str | None:
    """Return why the installed transformers cannot load a folder by itself, or None if it can.

    Its own code is asked: the config is read, and rotary modules like the model's are made of it.
    """
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        for rotary in find_rotaries(model):
            reference_frequencies(rotary, config)
    except (*_CONFIG_ERRORS, OSError, StrictDataclassError) as error:
        return describe_error(error.__cause__ or error)
    return None


def _release_hint(handle: Patch) -> str:
    """Return words about the first release of transformers that reads a patch, where known."""
    if handle.method.rope_parameters(next(iter(handle.geometries.values())))["rope_type"] == (
        "proportional"
    ):
        return ", or with transformers 5.5 or later"
    by_layer_type = None not in handle.geometries
    return ", or with transformers 5.9 or later" if by_layer_type else ""


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _write_native_rope_type(path: Path, model: nn.Module) -> None:
    """Spells what the model's own config calls by our names, which others lack, as they do."""
    said = parse_json(path.read_text())
    text = said.get("text_config", said)
    native = to_native_rope_parameters(_text_config(model))
    if native != _text_config(model).rope_parameters:
        text["rope_parameters"] = native
        path.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def _refuse_adapter_beside_model(folder: Path, adapters: list[Path]) -> None:
    """transformers loads an adapter that lies beside a whole model on top of that, unasked."""
    there, written = (
        ("config.json", "an adapter") if adapters else (ADAPTER_CONFIG, "a whole model")
    )
    if (folder / there).is_file():
        raise ValueError(
            f"{folder} holds {there}: expected another folder for {written}, as transformers would "
            "load both together from this one"
        )


def _replace_files(written: Path, folder: Path) -> None:
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
