"""Writing results: whole or not at all."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from rope_patch import disk


def write(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see the old one or the new one, never half of it.

    Raises:
        NotWritten: The disk is full, read-only, or refuses for another reason.
    """
    with disk.writing(path.parent, path.name):
        _write(path, content)


def _write(path: Path, content: str | bytes) -> None:
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


def write_json(path: Path, data: Any) -> None:
    """Writes JSON; what JSON has no form for is written as its text."""
    write(path, json.dumps(data, indent=1, default=str) + "\n")


def plain(name: str) -> str:
    """A file's name for something with any characters in its name."""
    return re.sub(r"[^\w.@-]+", "_", name).strip("_.") or "unnamed"
