"""A checkpoint with a patch in its config, made of another one's files without reading weights."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_patch.encodings.active import current
from rope_patch.entry_points import check_encoding, patch
from rope_patch.extension import Extension
from rope_patch.pretrained import demo
from rope_patch.pretrained.encoding_checkpoint import TABLES, is_encoding_sidecar
from rope_patch.pretrained.loading import (
    empty_model,
    load,
    read_config,
    require_complete_shards,
    require_model_folder,
)
from rope_patch.pretrained.saving import raise_tokenizer_length, record_patch
from rope_patch.pretrained.sidecar import SIDECAR, read_sidecar
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused, describe_error
from rope_patch.utils.terminal import progress_bar

_BLOCK = 2**24  # bytes of a file that are copied at once
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# What transformers does not read: other formats of the weights, and what tools leave.
_NOT_TAKEN = ("*.gguf", "*.onnx", "*.h5", "*.msgpack", "original", "onnx", ".*")


@dataclass(frozen=True)
class PatchedCheckpoint:
    """A checkpoint that `patch_checkpoint` wrote.

    Attributes:
        folder: Its folder.
        summary: What is in effect, in words, as `handle.summary()`.
        length: Tokens that it reads; None if the method follows the length.
        native: Whether plain transformers loads it to the same logits, up to float32 rounding.
        problem: Why the installed transformers cannot load it at all, if so.
        linked: Names of the files that are hard links to the source's.
        copied: Names of the files that are copies.
    """

    folder: Path
    summary: str
    length: int | None
    native: bool
    problem: str | None
    linked: list[str]
    copied: list[str]


@takes_remote_code
def patch_checkpoint(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    method: str | Extension,
    *,
    factor: float | str | None = None,
    length: int | str | None = None,
    trained_length: int | str | None = None,
    layer_types: list[str] | None = None,
    start: str = "auto",
    anyway: bool = False,
    copy: bool = False,
    trust_remote_code: bool = False,
    **options: Any,
) -> PatchedCheckpoint:
    """Write a checkpoint with a patch in its config, as `save` does, without reading the weights.

    The new folder holds `config.json` with the rotation, the sidecar `rope_patch.json`, and all
    other files of the checkpoint, as hard links where the disk allows it. A link takes no space and
    stays when the source is deleted; a program that writes into one of both files in place changes
    both. The tokenizer's `model_max_length` is raised to the patch's length. A failure leaves no
    folder behind. A table of positions is among the weights, so these are read and written there.

    Args:
        model: The checkpoint's folder, its name on the Hub, or `demo`.
        folder: A new or empty folder.
        method: See `patch`.
        factor: See `patch`.
        length: See `patch`.
        trained_length: See `patch`.
        layer_types: See `patch`.
        start: See `patch`.
        anyway: See `patch`.
        copy: Copy all files instead of linking them.
        trust_remote_code: Whether to execute Python code that the checkpoint brings.
        **options: The method's options.

    Returns:
        What was written.

    Raises:
        ValueError: The request is invalid, the checkpoint lacks files, or the folder is not new.
        OSError: Writing failed, or the disk has too little space; says where.
    """
    target = Path(folder)
    atomic_files.require_new_folder(target, "the patched checkpoint")
    source = _source_folder(demo.resolve_model_path(os.fspath(model)))
    if target.resolve().is_relative_to(source.resolve()):
        raise Refused(f"{target} lies in the checkpoint's own folder: expected another place")
    empty = empty_model(source, read_config(source), any_kind=True)
    extension = Extension.of(
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        start=start,
        anyway=anyway,
        **options,
    )
    plan = check_encoding(empty, extension)
    rewrites = plan is not None and (
        is_encoding_sidecar(read_sidecar(source)) or bool(plan.facts.tables)
    )
    if rewrites:  # no config says the rows of a table, so the weights are read and written
        empty = load(source, extension)
        handle = current(empty)
    else:
        handle = patch(empty, extension if plan else replace(extension, kernels="hf"))
    assert handle is not None
    files = _files(source, rewrites)
    with atomic_files.explain_write_errors(
        target.parent, target.name, "Nothing of it is left: REMEDY, and try again"
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
            staging = Path(temporary) / target.name
            staging.mkdir()
            (empty if rewrites else empty.config).save_pretrained(staging)
            # A link must not be written into: the config's own code is saved with it.
            files = [f for f in files if not (staging / f.relative_to(source)).exists()]
            linked, copied = _take_files(files, source, staging, copy)
            native, problem = record_patch(staging, empty, handle)
            raise_tokenizer_length(staging, handle)
            if target.exists():
                target.rmdir()
            staging.rename(target)
    return PatchedCheckpoint(
        target, handle.summary(), handle.length, native, problem, linked, copied
    )


def _source_folder(model: str) -> Path:
    """Return the folder of a checkpoint's files, from the Hub if it is a name."""
    require_model_folder(model, None)
    if not Path(model).is_dir():
        from huggingface_hub import snapshot_download

        skipped = [pattern for name in _NOT_TAKEN for pattern in (name, f"{name}/*")]
        try:
            model = snapshot_download(model, ignore_patterns=skipped)
        except (OSError, ValueError) as error:
            raise Refused(
                f"{model} is neither a folder nor a model that the Hub gives: "
                f"{describe_error(error)}"
            ) from error
    source = Path(model)
    if not any(path for pattern in _WEIGHTS for path in source.glob(pattern)):
        raise Refused(
            f"{source} has no weights in safetensors: expected a checkpoint that transformers "
            "loads. Load another form, such as GGUF, with rope_patch.load, and write it with "
            "rope_patch.save"
        )
    require_complete_shards(source)
    return source


def _files(source: Path, rewrites_weights: bool) -> list[Path]:
    """Return the files that belong to a checkpoint, without those that are written anew."""
    files = []
    written = {"config.json", SIDECAR, TABLES}
    skipped = (*_NOT_TAKEN, *_WEIGHTS, "*.index.json") if rewrites_weights else _NOT_TAKEN
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        taken = not any(Path(part).match(name) for part in parts for name in skipped)
        if taken and path.is_file() and str(path.relative_to(source)) not in written:
            files.append(path)
    return files


def _take_files(
    files: list[Path], source: Path, staging: Path, copy: bool
) -> tuple[list[str], list[str]]:
    """Link files into a folder, or copy those that cannot be linked; return the names of both."""
    linked: list[str] = []
    to_copy: list[tuple[Path, Path]] = []
    for path in files:
        place = staging / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not copy and _link(path, place):
            linked.append(str(path.relative_to(source)))
        else:
            to_copy.append((path, place))
    total = sum(path.stat().st_size for path, _ in to_copy)
    free = shutil.disk_usage(staging).free
    if total > free:
        raise Refused(
            f"the files to copy take {total / 1e9:,.1f} GB, {staging.parent.parent} has "
            f"{free / 1e9:,.1f} GB left: make room, or name a folder on the checkpoint's own disk, "
            "where files are linked"
        )
    with progress_bar(
        total=total, desc="copying", unit="B", unit_scale=True, disable=total < 2**28
    ) as bar:
        for path, place in to_copy:
            _copy(path, place, bar)
    return linked, [str(place.relative_to(staging)) for _, place in to_copy]


def _link(path: Path, place: Path) -> bool:
    """Make a hard link; return False where the disks or their format have none."""
    try:
        os.link(path.resolve(), place)
    except OSError:
        return False
    return True


def _copy(path: Path, place: Path, bar: Any) -> None:
    with path.open("rb") as old, place.open("wb") as new:
        while block := old.read(_BLOCK):
            new.write(block)
            bar.update(len(block))
