"""Checkpoints of models whose tables of positions, slopes or buckets are extended.

Plain transformers rebuilds what the config and the weights say: learned tables, and T5's largest
distance. Those are native, and config.json keeps their new fields. All else loads as the unpatched
model, and the sidecar says what to do again. The tables before the patch lie beside the weights,
so that another method starts from them, and so does undoing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from rope_patch.patching.encodings.buckets import MAX_DISTANCE, owns_buckets
from rope_patch.patching.encodings.handle import EncodingPatch
from rope_patch.patching.encodings.probe import small_config
from rope_patch.patching.encodings.table import TableSite
from rope_patch.utils.errors import Refused, parse_json
from rope_patch.utils.versions import version

TABLES = "rope_patch_tables.safetensors"
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
    original = dict(handle.original)
    if native and handle.method == "max-distance":
        original[MAX_DISTANCE] = handle.original_value(handle.sites[0], MAX_DISTANCE)
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        **extension.to_dict(),
        "target_length": handle.length,
        "native": native,
        "original": original,
        _POSITIONS: {site.name: site.kind for site in handle.sites},
    }


def record_encoding(folder: Path, handle: EncodingPatch) -> dict[str, Any]:
    """Complete the files of an extended model, and return its sidecar.

    Args:
        folder: Holds the config and the weights that transformers wrote for the patched model.
        handle: The patch in effect.
    """
    path = folder / "config.json"
    config = parse_json(path.read_text())
    if (distance := _new_max_distance(handle)) is not None:
        path.write_text(json.dumps({**config, MAX_DISTANCE: distance}, indent=2) + "\n")
    native = _loads_natively(folder, handle)
    if not native:
        # A stretched table among the weights needs its length, or nothing loads the folder.
        kept = {
            name
            for site in handle.sites
            if isinstance(site, TableSite) and _is_saved(site, handle)
            for name in site.sighting.fields
        }
        unpatched = {k: v for k, v in handle.original.items() if k not in kept}
        path.write_text(json.dumps({**config, **unpatched}, indent=2) + "\n")
    tables = dict(_tables(handle, with_patched=not native))
    if tables:
        save_file(tables, folder / TABLES, metadata={"format": "pt"})
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
        for site in handle.sites:
            if isinstance(site, TableSite) and site.name in patched:
                site.table.copy_(patched[site.name])


def _tables(handle: EncodingPatch, *, with_patched: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tables before the patch, and those under it where no checkpoint has them."""
    for site in handle.sites:
        if isinstance(site, TableSite):
            key = f"{site.name}.{site.sighting.attribute}"
            original = handle.original_value(site, site.sighting.attribute)
            yield f"{_ORIGINAL}{key}", original.detach().cpu().contiguous()
            if with_patched:
                yield f"{_PATCHED}{key}", site.table.detach().cpu().contiguous()


def _is_saved(site: TableSite, handle: EncodingPatch) -> bool:
    """Return whether a checkpoint holds a site's table."""
    model: Any = handle.model
    key = f"{site.name}.{site.sighting.attribute}"
    return key in model.state_dict() and key not in (model._keys_to_ignore_on_save or ())


def _new_max_distance(handle: EncodingPatch) -> int | None:
    """Return T5's largest distance if it is what the patch changed; else None."""
    if handle.method != "max-distance":
        return None
    modules: list[Any] = [site.module for site in handle.sites]
    (distance,) = {getattr(module, MAX_DISTANCE) for module in modules}
    return distance


def _loads_natively(folder: Path, handle: EncodingPatch) -> bool:
    """Return whether plain transformers reads positions from a folder as the patched model does.

    Loads one layer of the folder's model, and compares what it holds.
    """
    by_table = all(isinstance(site, TableSite) for site in handle.sites)
    if not by_table and handle.method != "max-distance":
        return False
    model = handle.model
    config = small_config(AutoConfig.from_pretrained(folder))
    with _quiet_transformers(), torch.random.fork_rng(devices=[]):
        plain: Any = type(model).from_pretrained(
            folder, config=config, dtype=model.dtype, ignore_mismatched_sizes=True
        )
    for site in handle.sites:
        if isinstance(site, TableSite):
            table = getattr(plain.get_submodule(site.name), site.sighting.attribute)
            ours = site.table.detach().to(table.device)
            if table.shape != ours.shape or not torch.equal(table, ours):
                return False
    return all(
        getattr(module, MAX_DISTANCE) == getattr(model.get_submodule(name), MAX_DISTANCE)
        for name, module in plain.named_modules()
        if owns_buckets(module)
    )


def _take_sizes(model: nn.Module, empty: nn.Module) -> None:
    """Cut buffers to the sizes of another model's, and take over its modules' numbers.

    Patched buffers begin with the values of the unpatched ones.
    """
    for name, buffer in empty.named_buffers():
        owner_name, _, attribute = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        present = getattr(owner, attribute)
        if present.shape != buffer.shape and present.ndim == buffer.ndim:
            setattr(owner, attribute, present[tuple(map(slice, buffer.shape))].clone())
    own = dict(model.named_modules())
    for name, module in empty.named_modules():
        for attribute, value in vars(module).items():
            if type(value) is int and vars(own[name]).get(attribute, value) != value:
                setattr(own[name], attribute, value)


def _read_tables(folder: Path, sidecar: dict[str, Any]) -> dict[str, torch.Tensor]:
    kinds = set(sidecar[_POSITIONS].values())
    path = folder / TABLES
    if not path.is_file() and not kinds & {"learned", "sinusoidal"}:
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
