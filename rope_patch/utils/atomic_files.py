"""Atomic writes, and errors that say why a file could not be written and what to do."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rope_patch.utils.errors import Refused, one_line


def write_json(path: Path, data: Any) -> None:
    """Write JSON; a value that JSON cannot express is written as its text."""
    atomic_write(path, json.dumps(data, indent=1, default=str) + "\n")


def safe_filename(name: str) -> str:
    """Return a file name for a name with any characters."""
    return re.sub(r"[^\w.@-]+", "_", name).strip("_.") or "unnamed"


_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)
# Words of the errors that torch and safetensors raise instead of an OSError.
_LIBRARY_WORDS = ("i/o error", "file write failed", "pytorchstreamwriter", "unexpected pos")
_PROBE_BYTES = 4096  # bytes
_MAKE_ROOM = "make room"

Advice = str | Callable[[], str]


class NotWritten(OSError):
    """A file could not be written.

    Args:
        failure: What could not be written, and where.
        reason: Why not, as the system says it.
        remedy: What to do about the disk: "make room", or "make it writable".
        advice: What is left and how to go on.
    """

    def __init__(self, failure: str, reason: str, remedy: str, advice: str = "") -> None:
        self.failure, self.reason, self.remedy, self.advice = failure, reason, remedy, advice
        super().__init__(f"{failure} ({reason})" + (f". {advice}" if advice else ""))

    def __reduce__(self) -> Any:  # other processes raise it, too
        return NotWritten, (self.failure, self.reason, self.remedy, self.advice)


@contextlib.contextmanager
def explain_write_errors(
    folder: str | os.PathLike[str], name: str, advice: Advice = ""
) -> Iterator[None]:
    """Raise an error that names the file if it cannot be written.

    If these contexts are nested, the outer one gives the name and, if it has one, the advice,
    because it knows more about the task.

    Args:
        folder: Where it is written.
        name: What is written: a file's name, or words such as "the finished model".
        advice: See `add_write_advice`.

    Raises:
        NotWritten: The disk is full, read-only, or refuses for another reason.
    """
    with add_write_advice(advice):
        try:
            yield
        except Exception as error:
            if not _is_about_disk(error):
                raise
            raise _as_not_written(error, Path(folder), name) from error


@contextlib.contextmanager
def add_write_advice(advice: Advice) -> Iterator[None]:
    """Add what is left and how to go on to a `NotWritten` from within.

    Args:
        advice: One sentence without its full stop, in which REMEDY stands for what to do about the
            disk; or a function that returns it. None is added if it is empty.
    """
    try:
        yield
    except NotWritten as error:
        if not advice:
            raise
        text = advice if isinstance(advice, str) else advice()
        text = text.replace("REMEDY", error.remedy)
        raise NotWritten(error.failure, error.reason, error.remedy, text) from error.__cause__


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old one or the new one, never half of it.

    Raises:
        NotWritten: The disk is full, read-only, or refuses for another reason.
    """
    with explain_write_errors(path.parent, path.name):
        _replace(path, content)


def _replace(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        # mkstemp's files are for their owner alone; a report is as public as umask says.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file or folder to the disk, where the system supports it."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_new_folder(folder: str | os.PathLike[str], purpose: str) -> None:
    """Raise unless a folder is new or empty, and can be written.

    Args:
        folder: The folder.
        purpose: What is to be written, for the error.

    Raises:
        ValueError: It is not empty, or a file.
        OSError: It is not writable.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} is not empty: expected a new folder, as nothing is overwritten")
    require_writable_folder(folder, purpose)


def require_writable_folder(folder: str | os.PathLike[str], purpose: str) -> None:
    """Raise unless files can be written to a folder, which need not exist; leave nothing behind.

    Args:
        folder: The folder.
        purpose: What it is for, such as "the report".

    Raises:
        ValueError: It is a file, or lies in one.
        NotWritten: Nothing can be written there.
    """
    folder = Path(folder)
    with explain_write_errors(folder, purpose):
        nearest = _nearest_existing(folder)
        if not nearest.is_dir():
            hint = ", made if it is missing" if nearest == folder else ""
            raise ValueError(f"{nearest} is a file: expected a folder for {purpose}{hint}")
        _probe_write(nearest)


def require_writable_file(
    path: str | os.PathLike[str], purpose: str, *, folder_exists: bool
) -> None:
    """Raise unless a file can be written; leave nothing behind.

    Args:
        path: The file; an older one is replaced.
        purpose: What it is for, such as "the picture".
        folder_exists: Whether its folder must exist already.

    Raises:
        ValueError: It is a folder, or its folder does not exist or is a file.
        NotWritten: Nothing can be written there.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: expected a file for {purpose}")
    with explain_write_errors(path.parent, path.name):
        nearest = _nearest_existing(path.parent)
        if not nearest.is_dir():
            raise ValueError(f"{nearest} is a file: expected the folder of {path}")
        if folder_exists and nearest != path.parent:
            raise ValueError(
                f"there is no folder {path.parent} for {path.name}: make it first, or give another "
                "path"
            )
        _probe_write(nearest)


def _nearest_existing(path: Path) -> Path:
    """Return the path, or the first of its parents that exists."""
    while True:
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        else:
            return path


def _probe_write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * _PROBE_BYTES)
        file.flush()
        os.fsync(file.fileno())


def _is_about_disk(error: Exception) -> bool:
    if isinstance(error, NotWritten) or getattr(error, "errno", None) is not None:
        return True
    # Libraries' own OSErrors without a number are about what a file says.
    return any(word in str(error).lower() for word in _LIBRARY_WORDS)


def _as_not_written(error: Exception, folder: Path, name: str) -> NotWritten:
    if isinstance(error, NotWritten):
        reason, is_disk_full, advice = error.reason, error.remedy == _MAKE_ROOM, error.advice
    else:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        is_disk_full, advice = getattr(error, "errno", None) in (None, *_DISK_FULL_CODES), ""
    free_text = f", where {_free_bytes(folder) / 1e6:,.1f} MB are free" if is_disk_full else ""
    location = folder.absolute() if str(folder) == "." else folder
    failure = f"{name} could not be written to {location}{free_text}"
    return NotWritten(failure, reason, _MAKE_ROOM if is_disk_full else "make it writable", advice)


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(_nearest_existing(folder)).free
    except OSError:
        return 0
