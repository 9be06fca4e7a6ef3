"""A new folder of JSON lines, one file a source, that appears when all of it is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rope_patch.utils import atomic_files

_SUFFIX = re.compile(r"\.(jsonl|json|txt|md|parquet)(\.gz)?$", re.IGNORECASE)


class CleanFolder:
    """Writes documents of several sources to a new folder.

    As a context: the folder appears at the end of the `with`, or not at all if that fails.

    Args:
        folder: The folder: missing or empty, since nothing is overwritten.
        sources: Names of the sources.
        text_column: The column in which texts are written.

    Raises:
        ValueError: The folder holds something; see `atomic_files.require_new_folder`.
        OSError: It cannot be written.
    """

    def __init__(self, folder: Path, sources: Sequence[str], text_column: str) -> None:
        atomic_files.require_new_folder(folder, "the documents")
        self.folder, self._column = folder, text_column
        self._names = file_names(sources)
        self._stack = ExitStack()

    def __enter__(self) -> CleanFolder:
        """Make the temporary folder beside the final one."""
        parent = self.folder.absolute().parent
        with atomic_files.explain_write_errors(self.folder, "the documents"):
            parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=parent)
            self._temporary = Path(temporary)
            self._stack.callback(shutil.rmtree, self._temporary, ignore_errors=True)
            self._files: dict[str, IO[str]] = {
                source: self._open(name) for source, name in self._names.items()
            }
        return self

    def _open(self, name: str) -> IO[str]:
        path = self._temporary / name
        return self._stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))

    def write(self, source: str, document: str | dict[str, Any]) -> None:
        """Write a document: its text, or its record.

        Raises:
            OSError: The disk is full or fails.
        """
        record = {self._column: document} if isinstance(document, str) else document
        with atomic_files.explain_write_errors(self.folder, self._names[source]):
            self._files[source].write(_json_line(record))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Move the folder into place, or remove what was written."""
        with self._stack:
            if error is None:
                with atomic_files.explain_write_errors(self.folder, "the documents"):
                    self._publish()

    def _publish(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        umask = os.umask(0)
        os.umask(umask)
        self._temporary.chmod(0o777 & ~umask)  # mkdtemp's is for its owner alone
        if self.folder.exists():
            self.folder.rmdir()  # fails if something was put there meanwhile
        self._temporary.rename(self.folder)


def file_names(sources: Sequence[str]) -> dict[str, str]:
    """Return a file name for each source, all different."""
    names: dict[str, str] = {}
    for source in sources:
        scheme, _, rest = source.partition(":")
        stem = rest if scheme in ("hub", "novels") else _SUFFIX.sub("", Path(source).name)
        stem = atomic_files.safe_filename(stem)
        used = {name.casefold() for name in names.values()}
        number, name = 1, f"{stem}.jsonl"
        while name.casefold() in used:
            number += 1
            name = f"{stem}-{number}.jsonl"
        names[source] = name
    return names


def _json_line(record: dict[str, Any]) -> str:
    try:
        line = json.dumps(record, ensure_ascii=False)
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 lacks
        line = json.dumps(record)
    return line + "\n"
