"""Load PEFT adapters, which fit one rotation or encoding: that of their base model in training."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rope_patch.encodings.sites.handle import EncodingPatch, current_encoding
from rope_patch.entry_points import check, check_encoding, patch
from rope_patch.extension import Extension
from rope_patch.patching import Patch, current
from rope_patch.pretrained.encoding_checkpoint import is_encoding_sidecar
from rope_patch.pretrained.saving import ADAPTER_CONFIG
from rope_patch.pretrained.sidecar import (
    SIDECAR,
    adapter_start,
    config_already_rotates_so,
    describe_patch,
    extension_from_sidecar,
    mark_trained_as,
    matches_sidecar,
    read_sidecar,
    rotate_alike,
)
from rope_patch.utils.errors import Refused, parse_json
from rope_patch.utils.installation import install_hint

logger = logging.getLogger("rope_patch")


def require_same_rotation(model: nn.Module, folder: str | os.PathLike[str]) -> Extension | None:
    """Return how to patch a base so that it rotates as an adapter's base did in training.

    Args:
        model: The base. It is not changed.
        folder: The adapter's folder.

    Returns:
        The request to patch it with, or None if it rotates so already.

    Raises:
        ValueError: The base rotates otherwise, or cannot be patched to rotate so.
    """
    sidecar = read_sidecar(folder)
    if sidecar is not None and is_encoding_sidecar(sidecar):
        return require_same_encoding(model, folder, sidecar, extension_from_sidecar(sidecar))
    active_patch = current(model)
    if sidecar is None:
        if active_patch is not None:
            logger.warning(
                "%s has no %s, so nobody knows under which rotation the adapter was trained; its "
                "base is now patched: %s",
                folder,
                SIDECAR,
                describe_patch(active_patch),
            )
        return None
    if active_patch is None and config_already_rotates_so(model, sidecar):
        return None
    extension = extension_from_sidecar(sidecar)
    trained_with = f"the adapter in {folder} was trained on a base that was patched with"
    try:
        with adapter_start(model, sidecar):
            training_patch = Patch(check(model, extension))
    except (Refused, TypeError) as error:
        arguments = ", ".join(f"{k}={v!r}" for k, v in extension.arguments().items())
        raise Refused(
            f"{trained_with} method={extension.method!r}, {arguments}, which this one cannot be: "
            f"{error}"
        ) from error
    if not matches_sidecar(training_patch, sidecar):
        raise Refused(
            f"{trained_with} {describe_patch(training_patch)}, and that would rotate "
            f"{type(model).__name__} otherwise: the config of its base said "
            f"{sidecar['original']}, that of this one says {training_patch.original}; load the "
            "base that the adapter was trained on"
        )
    if active_patch is None:
        return extension
    if not rotate_alike(training_patch, active_patch):
        raise Refused(
            f"{trained_with} {describe_patch(training_patch)}, got one that is patched with "
            f"{describe_patch(active_patch)}; rope_patch.unpatch(model) first, and load_adapter "
            "patches it as the adapter needs it"
        )
    return None


_WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def load_adapter(model: Any, folder: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load a PEFT adapter onto its base, under the rotation it was trained under.

    An unpatched base is patched as the adapter's `rope_patch.json` records. A base that has that
    rotation already, by a patch or by its own config, is used as it is; frequencies are compared,
    not options. For an adapter without that file, a warning is logged if the base is patched,
    because the rotation of its training is unknown.

    Args:
        model: The base, or a PEFT model that gets another adapter.
        folder: A folder that `rope_patch.save` or PEFT wrote.
        **kwargs: Arguments of `peft.PeftModel.from_pretrained`: `is_trainable`, `adapter_name`, ...

    Returns:
        The PEFT model.

    Raises:
        ValueError: There is no adapter, it is damaged or belongs to another model, or it was
            trained under another rotation (names both). The base is unchanged.
    """
    current(model)  # raises if it is no model
    require_adapter(folder)
    peft = _import_peft()
    is_peft = isinstance(model, peft.PeftModel)
    name = kwargs.setdefault("adapter_name", "default")
    if is_peft and name in model.peft_config:
        raise Refused(
            f"expected a new name for the adapter in {folder}, got {name!r}, which the model has "
            f"already ({', '.join(model.peft_config)}); pass adapter_name=..."
        )
    extension = require_same_rotation(model, folder)
    base = model.get_base_model() if is_peft else model
    _require_matching_model(peft, base, folder)
    sidecar, handle = read_sidecar(folder), None
    with contextlib.ExitStack() as stack:
        if extension and sidecar is not None:
            stack.enter_context(adapter_start(model, sidecar))
            handle = patch(model, extension)
            stack.pop_all()
    try:
        if device_map := _peft_device_map(peft, base, folder):
            kwargs.setdefault("device_map", device_map)
        if is_peft:
            model.load_adapter(os.fspath(folder), **kwargs)
        else:
            model = peft.PeftModel.from_pretrained(model, os.fspath(folder), **kwargs)
        mark_trained_as(model, sidecar or {})
        return model
    except BaseException:
        if handle is not None:
            handle.undo()
        raise


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with an adapter and without a whole model beside it."""
    folder = Path(path)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def require_adapter(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless a path is a folder with a complete adapter."""
    folder = Path(path)
    if not folder.is_dir():
        raise Refused(
            f"no such folder: {path}; expected one with an adapter. An adapter on the Hub is to be "
            "fetched first: huggingface_hub.snapshot_download(name) returns its folder"
        )
    names = sorted(p.name for p in folder.iterdir())
    weights = [name for name in _WEIGHTS_FILES if name in names]
    for required, exists in (
        (ADAPTER_CONFIG, ADAPTER_CONFIG in names),
        (_WEIGHTS_FILES[0], bool(weights)),
    ):
        if not exists:
            raise Refused(
                f"{path} holds no {required}: expected a folder that rope_patch.save or PEFT "
                f"wrote, found {', '.join(names[:5]) or 'nothing'}"
            )
    if weights[0] == _WEIGHTS_FILES[0]:
        try:
            with safe_open(folder / weights[0], "pt"):
                pass
        except SafetensorError as error:
            raise Refused(
                f"{folder / weights[0]} is cut short or damaged ({error}); save the adapter again"
            ) from error


def adapter_base(folder: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Return the base that an adapter was trained on (path or Hub name) and its revision.

    Raises:
        ValueError: The adapter does not record it, or is damaged.
    """
    require_adapter(folder)
    path = Path(folder) / ADAPTER_CONFIG
    try:
        config = parse_json(path.read_text())
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (ValueError, AttributeError) as error:
        raise Refused(f"{path} is damaged ({error}): save the adapter again") from error
    base = base or (read_sidecar(folder) or {}).get("base_model")
    if not base or not isinstance(base, str):
        raise Refused(
            f"{path} does not say on which model the adapter was trained: expected "
            f"base_model_name_or_path, got {base!r}; load the base yourself, and call "
            f"rope_patch.load_adapter(model, {str(folder)!r})"
        )
    return base, revision


def _require_matching_model(peft: Any, base: Any, folder: str | os.PathLike[str]) -> None:
    """Raise if an adapter does not fit a model."""
    try:  # on an empty copy, because PEFT changes a model before it finds out
        with torch.device("meta"):
            empty = type(base)(copy.deepcopy(base.config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading onto the real model repeats them
            peft.PeftModel.from_pretrained(empty, os.fspath(folder))
    except Exception as error:  # other errors are left to PEFT
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = next(
            (line for line in lines if "size mismatch" in line), lines[0] if lines else ""
        )
        if "size mismatch" in message or "Target modules" in message:
            raise Refused(
                f"the adapter in {folder} does not fit {type(base).__name__}: {message}; expected "
                f"the model that it was trained on, {adapter_base(folder)[0]!r}"
            ) from error


def _peft_device_map(peft: Any, base: Any, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return an offloaded base's device map in PEFT's names, or PEFT would move the base."""
    devices = getattr(base, "hf_device_map", None) or {}
    if not {"cpu", "disk"} & set(devices.values()):
        return None
    if peft.PeftConfig.from_pretrained(os.fspath(folder)).is_prompt_learning:
        return None
    return {f"base_model.model.{name}".rstrip("."): device for name, device in devices.items()}


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise Refused(
            f"{error.name} is not installed, which adapters need: {install_hint('train')}"
        ) from error
    return peft


def require_same_encoding(
    model: nn.Module,
    folder: str | os.PathLike[str],
    sidecar: dict[str, Any],
    extension: Extension,
) -> Extension | None:
    """Return how to extend a base so that it reads positions as an adapter's base in training.

    Args:
        model: The base. It is not changed.
        folder: The adapter's folder.
        sidecar: The adapter's sidecar.
        extension: The request that the sidecar records.

    Returns:
        The request to patch it with, or None if it is patched so already.

    Raises:
        ValueError: The base is extended otherwise, or cannot be extended so.
    """
    trained_with = (
        f"the adapter in {folder} was trained on a base that was patched with {extension.method}, "
        f"{sidecar['trained_length']:,} → {sidecar['target_length'] or 'any length'} tokens"
    )
    active = current_encoding(model)
    if active is not None:
        if not is_same_encoding(active, sidecar):
            raise Refused(
                f"{trained_with}, got one that is patched with {active}; rope_patch.unpatch(model) "
                "first, and load_adapter patches it as the adapter needs it"
            )
        return None
    try:
        plan = check_encoding(model, extension)
    except (Refused, TypeError) as error:
        raise Refused(f"{trained_with}, which this one cannot be: {error}") from error
    if plan is None:
        raise Refused(f"{trained_with}, and {type(model).__name__} rotates: load the adapter's own")
    before: Any = plan.model.config
    differing = {
        name: getattr(before, name, None)
        for name, value in sidecar["original"].items()
        if getattr(before, name, None) != value
    }
    if differing:
        raise Refused(
            f"{trained_with} and whose config said {sidecar['original']} before; this one says "
            f"{differing}: load the base that the adapter was trained on"
        )
    return extension


def is_same_encoding(active: EncodingPatch, sidecar: dict[str, Any]) -> bool:
    """Return whether a patch extends the places that a sidecar records, in the same way."""
    return (
        active.method == sidecar["method"]
        and active.trained_length == sidecar["trained_length"]
        and active.length == sidecar["target_length"]
        and {site.name for site in active.facts.sites} == set(sidecar["positions"])
    )
