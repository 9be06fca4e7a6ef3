"""Folder for an engine's converter: a checkpoint's files with an export's config and tensors.

The weights are linked, not copied. The checkpoint's folder is not changed, because other programs
would fail on a tensor that the converter needs beside the weights.
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

from rope_patch.exporting.target import Export
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused, parse_json

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# llama.cpp's converter takes model*.safetensors, sorted, and older converters guess the output type
# from the very first tensor, so this name sorts after the weights.
SHARD = "model_rope_freqs.safetensors"
_NOT_LINKED = (CONFIG, INDEX, SHARD, "rope_patch.json")  # the sidecar records another config


def write_folder(
    export: Export, source: str | os.PathLike[str], folder: str | os.PathLike[str]
) -> Path:
    """Write the input folder of llama.cpp's converter.

    It holds links to the checkpoint's files (copies on disks without links), the checkpoint's
    `config.json` with the export's fields, and the export's tensors in a file of their own, which
    is added to the index of the weights, if there is one. A failure leaves no folder behind.

    Args:
        export: An export for llama.cpp with fields.
        source: The checkpoint's folder, in safetensors.
        folder: A new or empty folder.

    Returns:
        The folder's path.

    Raises:
        ValueError: The export has no fields, the source is no checkpoint folder, or the new folder
            is not empty.
        OSError: Writing failed; says where.
    """
    source, folder = Path(source), Path(folder)
    if export.engine != "llama.cpp":
        raise Refused(
            f"a folder is made for llama.cpp's converter, got an export for {export.engine}: pass "
            "it as its notes say"
        )
    if not export.config:
        raise Refused(
            "there is nothing to convert anew: the words of this export are for a GGUF file that "
            "was converted from the model as it was"
        )
    weights = _weight_files(source)
    atomic_files.require_new_folder(folder, "the converter's files")
    config = merge_config(_read_json(source / CONFIG), export.config)
    with atomic_files.explain_write_errors(
        folder.parent, folder.name, "Nothing of it is left: REMEDY, and try again"
    ):
        _build_folder(export, source, folder, config, weights)
    return folder


def _build_folder(
    export: Export, source: Path, folder: Path, config: dict[str, Any], weights: list[Path]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        staging = Path(temporary) / folder.name
        staging.mkdir()
        _write_json(staging / CONFIG, config)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in _NOT_LINKED:
                _link_file(path, staging / path.name)
        if (source / INDEX).is_file():
            _write_json(staging / INDEX, _add_to_index(_read_json(source / INDEX), export))
        if export.tensors:
            _require_new_tensors(export, weights)
            numbers = {k: torch.tensor(v, dtype=torch.float32) for k, v in export.tensors.items()}
            save_file(numbers, staging / SHARD, metadata={"format": "pt"})
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)


def merge_config(config: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a config with new fields; fields of a nested config are merged into it.

    transformers 4's fields for the rotation are removed beside `rope_parameters`.
    """
    result = dict(config)
    for name, value in new.items():
        is_nested = isinstance(value, dict) and name.endswith("_config")
        result[name] = merge_config(result.get(name) or {}, value) if is_nested else value
    if "rope_parameters" in new:
        result.pop("rope_scaling", None)
        theta = new["rope_parameters"].get("rope_theta")  # None with several layer types
        if result.pop("rope_theta", None) is not None and theta is not None:
            result["rope_theta"] = theta
    return result


def _weight_files(source: Path) -> list[Path]:
    """Return the weight files that the converter reads."""
    if not source.is_dir():
        raise Refused(
            f"{source} is not a folder: the weights are linked from where they lie; download the "
            "model first (hf download NAME --local-dir FOLDER)"
        )
    paths = [path for path in sorted(source.glob("model*.safetensors")) if path.name != SHARD]
    if not paths or not (source / CONFIG).is_file():
        raise Refused(
            f"{source} has no config.json with model*.safetensors beside it, which the converter "
            "reads: save the model there with save_pretrained"
        )
    return paths


def _require_new_tensors(export: Export, weights: list[Path]) -> None:
    for path in weights:
        with safe_open(path, framework="pt") as opened:
            if existing := export.tensors.keys() & set(opened.keys()):
                raise Refused(
                    f"{path} has {', '.join(sorted(existing))} already: export from a checkpoint "
                    "without it"
                )


def _add_to_index(index: dict[str, Any], export: Export) -> dict[str, Any]:
    return {**index, "weight_map": {**index["weight_map"], **dict.fromkeys(export.tensors, SHARD)}}


def _link_file(path: Path, to: Path) -> None:
    for link in (os.symlink, os.link, shutil.copyfile):
        try:
            link(path.resolve(), to)
        except OSError:
            if link is shutil.copyfile:
                raise
        else:
            return


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}): get the checkpoint again") from error


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
