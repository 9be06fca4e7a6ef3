"""Checkpoints that are whole or not there: written aside, listed, and moved into place at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rope_patch.utils import atomic_files
from rope_patch.utils.errors import parse_json

logger = logging.getLogger("rope_patch")

MANIFEST = "whole.json"  # every file's size and sha256: written last
PREFIX = "checkpoint-"
MODEL = "model"  # the finished model's folder
_TEMPORARY = ".writing"


@contextlib.contextmanager
def atomic_checkpoint(
    folder: Path, step: int, *, is_main: bool, wait: Callable[[], Any], keep: int | None = None
) -> Iterator[Path]:
    """Let a checkpoint be written, and make it count once all of it is on the disk.

    Args:
        folder: The run's folder.
        step: Optimizer steps that were taken.
        is_main: Whether this process is the one that moves files.
        wait: Returns when every process has called it.
        keep: How many checkpoints to keep, this one and those before it; all of them if None.
            Later ones go in any case.

    Yields:
        Where to write: a folder in which `checkpoint-STEP` is to appear.

    Raises:
        OSError: It could not be written; says what is left to go on from. No half of it stays.
    """
    aside = folder / _TEMPORARY
    if is_main:
        shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
        aside.mkdir(parents=True)
    wait()
    with explain_write_errors(folder, f"{PREFIX}{step}"):
        try:
            yield aside
            wait()
            if is_main:
                written = aside / f"{PREFIX}{step}"
                _write_manifest(written)
                shutil.rmtree(folder / written.name, ignore_errors=True)
                written.rename(folder / written.name)
                sync(folder)
        finally:
            if is_main:
                shutil.rmtree(aside, ignore_errors=True)
    if is_main:
        standing = _checkpoints(folder)
        # Later ones are damaged, or of a course that the run was taken back from.
        left = [p for p in standing if step_of(p) > step]
        old = [p for p in standing if step_of(p) <= step][:-keep] if keep else []
        for checkpoint in left + old:
            shutil.rmtree(checkpoint, ignore_errors=True)
    wait()


@contextlib.contextmanager
def explain_write_errors(folder: Path, description: str) -> Iterator[None]:
    """Say what is free, and what is left to go on from, if something cannot be written.

    Args:
        folder: The run's folder.
        description: What is written there meanwhile.

    Raises:
        OSError: It could not be written.
    """

    def advice() -> str:
        last = latest_complete(folder)
        left = f"{last} is whole" if last else "There is no whole checkpoint"
        return f"{left}: REMEDY, and start again with --resume auto"

    with atomic_files.explain_write_errors(folder, description, advice):
        yield


def latest_complete(folder: Path) -> Path | None:
    """The last checkpoint that is all there, or None; warns of newer ones that are not."""
    for checkpoint in reversed(_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint
        logger.warning("%s is passed over: %s", checkpoint, damage)
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What a checkpoint lacks, or None if it is whole."""
    try:
        files = parse_json((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was not finished"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    if not isinstance(files, dict) or not files:
        return f"its {MANIFEST} lists no files"
    for name, written in files.items():
        path = checkpoint / name
        try:
            size, digest = written
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
            if _sha256(path) != digest:
                return f"{name} is not what was written (its sha256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
        except (ValueError, TypeError):
            return f"its {MANIFEST} is damaged where it lists {name!r}"
    return None


def resume_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint to go on from.

    Args:
        folder: The run's folder.
        resume: "auto", "no", or a checkpoint.

    Raises:
        ValueError: Not the checkpoint it should be; or see `require_no_run`.
    """
    if resume == "auto":
        return latest_complete(folder)
    if resume == "no":
        require_no_run(folder)
        return None
    checkpoint = Path(resume)
    if not checkpoint.is_dir() or not _has_checkpoint_name(checkpoint.resolve()):
        raise ValueError(f"no checkpoint {resume}: expected auto, no, or a folder {PREFIX}N")
    if damage := find_damage(checkpoint):
        raise ValueError(f"{checkpoint} is not whole: {damage}; --resume auto finds one that is")
    return checkpoint.resolve()


def require_no_run(folder: Path) -> None:
    """Raise if a folder holds checkpoints or the finished model of a run.

    Raises:
        ValueError: It does; says what to do.
    """
    if standing := _checkpoints(folder):
        raise ValueError(
            f"{folder} holds {standing[-1].name} of an earlier run: expected --resume auto to go "
            "on from it, or another --output_dir"
        )
    if (folder / MODEL).exists():
        raise ValueError(
            f"{folder} holds the finished model of an earlier run, which kept no checkpoints: give "
            "another --output_dir, or remove that one first"
        )


def contains_run(folder: Path) -> bool:
    """Return whether a folder holds checkpoints, whole or not, or the finished model of a run."""
    return bool(_checkpoints(folder)) or (folder / MODEL).exists()


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps that a checkpoint was written after."""
    return int(checkpoint.name.removeprefix(PREFIX))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(filter(_has_checkpoint_name, folder.glob(f"{PREFIX}*")), key=step_of)


def _has_checkpoint_name(checkpoint: Path) -> bool:
    return checkpoint.name.startswith(PREFIX) and checkpoint.name.removeprefix(PREFIX).isdecimal()


def _write_manifest(checkpoint: Path) -> None:
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path in files:
        sync(path)
    manifest = {
        path.relative_to(checkpoint).as_posix(): [path.stat().st_size, _sha256(path)]
        for path in files
    }
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    sync(checkpoint / MANIFEST)
    sync(checkpoint)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, where the system can say so."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
