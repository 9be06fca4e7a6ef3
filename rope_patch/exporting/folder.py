"""A folder for an engine's converter: a checkpoint's own files, with an export's config in it.

The weights are linked, not copied, and the checkpoint's folder stays as it is: a tensor that an
engine wants beside the weights is one that other programs would stumble over.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rope_patch.exporting.result import Export
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import parse_json

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# llama.cpp's converter takes model*.safetensors, sorted, and older ones guess the type to write
# from the first tensor of all: this name comes after the weights'.
SHARD = "model_rope_freqs.safetensors"
_NOT_LINKED = (CONFIG, INDEX, SHARD, "rope_patch.json")  # the last says what the config was before


def write_folder(
    export: Export, source: str | os.PathLike[str], folder: str | os.PathLike[str]
) -> Path:
    """Makes the folder that llama.cpp's converter is to be given.

    It has the checkpoint's files as links (copies where a disk has no links), the checkpoint's
    `config.json` with the export's fields in it, and what tensors the export has in a file of their
    own, which the index of the weights names, if there is one. It is whole or not there.

    Args:
        export: What `export` gave for llama.cpp, with fields.
        source: The checkpoint's folder, in safetensors.
        folder: A new or empty folder.

    Returns:
        The folder's path.

    Raises:
        ValueError: The export has no fields to write, the source is no such folder, or there is
            something in the new one.
        OSError: It could not be written; says where.
    """
    source, folder = Path(source), Path(folder)
    if export.engine != "llama.cpp":
        raise ValueError(
            f"a folder is made for llama.cpp's converter, got an export for {export.engine}: pass "
            "it as its notes say"
        )
    if not export.config:
        raise ValueError(
            "there is nothing to convert anew: the words of this export are for a GGUF file that "
            "was converted from the model as it was"
        )
    weights = _weight_files(source)
    require_new_folder(folder)
    config = merge_config(_read_json(source / CONFIG), export.config)
    with atomic_files.explain_write_errors(
        folder.parent, folder.name, "Nothing of it is left: REMEDY, and try again"
    ):
        _build_folder(export, source, folder, config, weights)
    return folder


def require_new_folder(folder: str | os.PathLike[str]) -> None:
    """Raise unless `write_folder` can make a folder.

    Raises:
        ValueError: There is something in it, or it is a file.
        OSError: Nothing can be written there.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: expected a new folder, as nothing is overwritten")
    atomic_files.require_writable_folder(folder, "the converter's files")


def _build_folder(
    export: Export, source: Path, folder: Path, config: dict[str, Any], weights: list[Path]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        _write_json(made / CONFIG, config)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in _NOT_LINKED:
                _link_file(path, made / path.name)
        if (source / INDEX).is_file():
            _write_json(made / INDEX, _add_to_index(_read_json(source / INDEX), export))
        if export.tensors:
            _require_new_tensors(export, weights)
            numbers = {k: torch.tensor(v, dtype=torch.float32) for k, v in export.tensors.items()}
            save_file(numbers, made / SHARD, metadata={"format": "pt"})
        if folder.exists():
            folder.rmdir()
        made.rename(folder)


def merge_config(config: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A config with other fields; those of a nested config go into it.

    Fields of transformers 4 that say the rotation as well do not stay beside `rope_parameters`.
    """
    said = dict(config)
    for name, value in new.items():
        nested = isinstance(value, dict) and name.endswith("_config")
        said[name] = merge_config(said.get(name) or {}, value) if nested else value
    if "rope_parameters" in new:
        said.pop("rope_scaling", None)
        theta = new["rope_parameters"].get("rope_theta")  # none where layer types have their own
        if said.pop("rope_theta", None) is not None and theta is not None:
            said["rope_theta"] = theta
    return said


def _weight_files(source: Path) -> list[Path]:
    """The files that the converter reads."""
    if not source.is_dir():
        raise ValueError(
            f"{source} is not a folder: the weights are linked from where they lie; download the "
            "model first (hf download NAME --local-dir FOLDER)"
        )
    found = [path for path in sorted(source.glob("model*.safetensors")) if path.name != SHARD]
    if not found or not (source / CONFIG).is_file():
        raise ValueError(
            f"{source} has no config.json with model*.safetensors beside it, which the converter "
            "reads: save the model there with save_pretrained"
        )
    return found


def _require_new_tensors(export: Export, weights: list[Path]) -> None:
    for path in weights:
        with safe_open(path, framework="pt") as opened:
            if known := export.tensors.keys() & set(opened.keys()):
                raise ValueError(
                    f"{path} has {', '.join(sorted(known))} already: export from a checkpoint "
                    "without it"
                )


def _add_to_index(index: dict[str, Any], export: Export) -> dict[str, Any]:
    return {**index, "weight_map": {**index["weight_map"], **dict.fromkeys(export.tensors, SHARD)}}


def _link_file(path: Path, to: Path) -> None:
    for how in (os.symlink, os.link, shutil.copyfile):
        try:
            how(path.resolve(), to)
        except OSError:
            if how is shutil.copyfile:
                raise
        else:
            return


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): get the checkpoint again") from error


def _write_json(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
