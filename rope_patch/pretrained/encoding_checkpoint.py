"""Save and load models that do not rotate: extended encodings, and those that `encode` gave.

Of an extended encoding, plain transformers rebuilds what the config and the weights say: learned
tables, and T5's largest distance. Those are native, and config.json keeps their new fields. All
else loads as the unpatched model, and the sidecar says what to do again. The tables before the
patch lie beside the weights, so that another method starts from them, and so does undoing.

Of an encoding that `rope_patch.encode` gave, `model-encoding.safetensors` holds the trained parts,
and the sidecar name and options. The other weights are where plain transformers expects them, so it
loads the folder as a model of its class's own encoding, which is another model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging as transformers_logging

from rope_patch.encodings.active import current
from rope_patch.encodings.replacement.entry_point import EncodedModel, encode
from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.encodings.sites.plan import encoding_facts
from rope_patch.encodings.sites.probe import small_config
from rope_patch.encodings.sites.site import SiteFacts
from rope_patch.encodings.sites.table import TABLE_KINDS
from rope_patch.entry_points import patch
from rope_patch.extension import Extension
from rope_patch.patching.handle import Patch
from rope_patch.transformers_api.remote_code import config_from_fields
from rope_patch.utils.errors import Refused, parse_json
from rope_patch.utils.installation import version

SIDECAR = "rope_patch.json"
TABLES = "rope_patch_tables.safetensors"
WEIGHTS = "model-encoding.safetensors"
KIND = "encode"  # the sidecar's `kind` of a model that was given another encoding
_POSITIONS = "positions"  # the sidecar's key that tells these sidecars from those of rotations
_ORIGINAL, _PATCHED = "original.", "patched."


def is_encoding_sidecar(sidecar: dict[str, Any] | None) -> bool:
    """Return whether a sidecar records an extension of positions that do not rotate."""
    return sidecar is not None and _POSITIONS in sidecar


def encoding_sidecar(handle: EncodingPatch, native: bool) -> dict[str, Any]:
    """Return the sidecar of an extended model.

    Args:
        handle: The patch in effect.
        native: Whether plain transformers loads the folder to the same logits.
    """
    extension = replace(handle.extension, kernels="auto")
    facts, original = handle.facts, dict(handle.original)
    if native:
        original |= {name: before for name, before, _ in facts.stated}
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        **extension.to_dict(),
        "target_length": handle.length,
        "native": native,
        "original": original,
        _POSITIONS: {site.name: site.kind for site in facts.sites},
    }


def record_encoding(folder: Path, handle: EncodingPatch) -> dict[str, Any]:
    """Complete the files of an extended model, and return its sidecar.

    Args:
        folder: Holds the config and the weights that transformers wrote for the patched model.
        handle: The patch in effect.
    """
    path = folder / "config.json"
    config = parse_json(path.read_text())
    if stated := {name: number for name, _, number in handle.facts.stated}:
        path.write_text(json.dumps({**config, **stated}, indent=2) + "\n")
    native = _loads_natively(folder, handle)
    if not native:
        # A stretched table among the weights needs its length, or nothing loads the folder.
        tables = handle.facts.tables
        kept = {name for site in tables if _is_saved(site, handle.model) for name in site.fields}
        unpatched = {k: v for k, v in handle.original.items() if k not in kept}
        path.write_text(json.dumps({**config, **unpatched}, indent=2) + "\n")
    tensors = dict(_tables(handle, with_patched=not native))
    if tensors:
        save_file(tensors, folder / TABLES, metadata={"format": "pt"})
    return encoding_sidecar(handle, native)


def unpatch_loaded(model: Any, empty: nn.Module, folder: Path, sidecar: dict[str, Any]) -> Any:
    """Give a model that transformers loaded from a saved folder its sizes before the patch.

    Args:
        model: The model as the folder's config and weights say; changed in place.
        empty: One of the same class that was made from the config before the patch.
        folder: The folder.
        sidecar: Its sidecar.

    Returns:
        The patched tables, by the names of their modules.

    Raises:
        ValueError: The file of tables is missing or damaged, or a table is on the disk.
    """
    stored = _read_tables(folder, sidecar)
    patched: dict[str, torch.Tensor] = {}
    for key, original in stored.items():
        if not key.startswith(_ORIGINAL):
            continue
        name, _, attribute = key.removeprefix(_ORIGINAL).rpartition(".")
        module = model.get_submodule(name)
        loaded = getattr(module, attribute)
        if loaded.is_meta:
            raise Refused(
                f"{name} was moved to the disk, where its table cannot be extended: expected it in "
                "memory, by another device_map or max_memory"
            )
        patched[name] = stored.get(f"{_PATCHED}{name}.{attribute}", loaded.detach())
        table = original.to(loaded)
        if isinstance(loaded, nn.Parameter):
            table = nn.Parameter(table, requires_grad=loaded.requires_grad)
        setattr(module, attribute, table)
    _take_sizes(model, empty)
    for module in model.modules():
        config = vars(module).get("config")
        for name, value in sidecar["original"].items():
            if type(config) is type(empty.config):
                setattr(config, name, value)
    return patched


def restore_tables(handle: EncodingPatch, patched: dict[str, torch.Tensor]) -> None:
    """Put the tables of a saved folder into a model that is patched as it was.

    They differ from what the method computes where they were trained under the patch.
    """
    with torch.no_grad():
        for name, _, _, table in handle.tables():
            if name in patched:
                table.copy_(patched[name])


def _tables(handle: EncodingPatch, *, with_patched: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tables before the patch, and those under it where no checkpoint has them."""
    for name, attribute, original, present in handle.tables():
        yield f"{_ORIGINAL}{name}.{attribute}", original.detach().cpu().contiguous()
        if with_patched:
            yield f"{_PATCHED}{name}.{attribute}", present.detach().cpu().contiguous()


def _is_saved(site: SiteFacts, model: Any) -> bool:
    """Return whether a checkpoint holds a site's table."""
    key = f"{site.name}.{site.table}"
    return key in model.state_dict() and key not in (model._keys_to_ignore_on_save or ())


def _loads_natively(folder: Path, handle: EncodingPatch) -> bool:
    """Return whether plain transformers reads positions from a folder as the patched model does."""
    facts = handle.facts
    if not facts.stated and len(facts.tables) < len(facts.sites):
        return False
    model = handle.model
    config = small_config(type(model.config).from_pretrained(folder))  # of one layer
    with _quiet_transformers(), torch.random.fork_rng(devices=[]):
        plain: Any = type(model).from_pretrained(
            folder, config=config, dtype=model.dtype, ignore_mismatched_sizes=True
        )
    for name, attribute, _, present in handle.tables():
        table = getattr(plain.get_submodule(name), attribute)
        ours = present.detach().to(table.device)
        if table.shape != ours.shape or not torch.equal(table, ours):
            return False
    return all(
        getattr(module, name, number) == number
        for module in plain.modules()
        for name, _, number in facts.stated
    )


def _take_sizes(model: nn.Module, empty: nn.Module) -> None:
    """Cut buffers to the sizes of another model's, and take over its modules' numbers."""
    for name, buffer in empty.named_buffers():
        owner_name, _, attribute = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        present = getattr(owner, attribute)
        if present.shape != buffer.shape and present.ndim == buffer.ndim:
            # Patched buffers begin with the values of the unpatched ones.
            setattr(owner, attribute, present[tuple(map(slice, buffer.shape))].clone())
    own = dict(model.named_modules())
    for name, module in empty.named_modules():
        for attribute, value in vars(module).items():
            if type(value) is int and vars(own[name]).get(attribute, value) != value:
                setattr(own[name], attribute, value)


def _read_tables(folder: Path, sidecar: dict[str, Any]) -> dict[str, torch.Tensor]:
    kinds = set(sidecar[_POSITIONS].values())
    path = folder / TABLES
    if not path.is_file() and not kinds & TABLE_KINDS:
        return {}
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refused(
            f"{path} is missing or damaged ({error}), which holds the tables before the patch: "
            "save the model again; plain transformers loads the folder "
            + ("to the patched model" if sidecar["native"] else "without the patch")
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from reporting the layers that one layer's model leaves out."""
    verbosity = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


# Fields of the sidecar of a model that was given another encoding.
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
    (folder / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")


def read_encoded(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the sidecar of an encoded model; None if a folder has none, or one of another kind.

    Raises:
        ValueError: The file is damaged.
    """
    path = Path(folder) / SIDECAR
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


def unencoded_config(folder: str | os.PathLike[str], sidecar: dict[str, Any]) -> Any:
    """Return the config of an encoded model's folder from before it was encoded."""
    fields = parse_json((Path(folder) / "config.json").read_text())
    fields.get("text_config", fields).update(sidecar["original"])
    return config_from_fields(folder, fields)


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
    """Read an encoding's trained parts."""
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
    for table in encoding_facts(model).tables:  # saved as it is, trained rows or stretched ones
        options["length"] = table.trained_length
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
