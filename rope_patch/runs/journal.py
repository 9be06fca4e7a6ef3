"""Append-only files of JSON lines, from which killed runs resume."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch.utils import atomic_files, checksums

_TAIL_BYTES = 1 << 16  # bytes that are read at once to find the end of the last complete line


@dataclass
class JournalLines:
    """Lines of a journal, checked.

    Attributes:
        entries: What the valid lines say.
        valid: The valid lines themselves.
        flaws: The number and the fault of each other line.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    valid: list[bytes] = field(default_factory=list)
    flaws: list[tuple[int, str]] = field(default_factory=list)


class JournalFile:
    """An append-only file of JSON lines, each with a checksum.

    An entry is on the disk when `append` returns. A last line that a kill cut short counts as not
    written, and the next `append` takes its place. Only one process may append to a file at a time.

    Args:
        path: The file; created with the first entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[bytes]:
        """Return all whole lines, without their ends."""
        raw = self.path.read_bytes() if self.path.exists() else b""
        *lines, tail = raw.split(b"\n")
        return [*lines, tail] if _is_whole(tail) else lines

    def append(self, *entries: dict[str, Any]) -> None:
        """Write entries to the disk.

        Args:
            *entries: What `checksums.seal` returned.

        Raises:
            NotWritten: They could not be written.
        """
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        with atomic_files.explain_write_errors(self.path.parent, self.path.name):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            with self.path.open("w+b" if is_new else "r+b") as file:
                end = _end_of_last_line(file)
                file.seek(end)
                if _is_whole(file.read()):  # only its line end is missing
                    text = "\n" + text
                else:
                    file.seek(end)
                    file.truncate()
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            if is_new:  # or a power failure may lose the file's name
                atomic_files.sync(self.path.parent)

    def rewrite(self, lines: list[bytes]) -> None:
        """Replace the file's content, all or nothing."""
        atomic_files.atomic_write(self.path, b"".join(line + b"\n" for line in lines))


def check_lines(lines: list[bytes], first: int = 1, **identity: Any) -> JournalLines:
    """Return what lines say, and which of them are damaged or of something else.

    Args:
        lines: Lines of a journal; empty ones are passed over.
        first: The number of the first one in its file.
        **identity: Entries that each line must have as given.
    """
    checked = JournalLines()
    for number, line in enumerate(lines, start=first):
        if not line:
            continue
        try:
            checked.entries.append(checksums.unseal(line, **identity))
        except ValueError as error:
            checked.flaws.append((number, str(error)))
        else:
            checked.valid.append(line)
    return checked


def _is_whole(line: bytes) -> bool:
    """Return whether a line without an end is an entry that a kill did not cut short."""
    try:
        checksums.unseal(line)
    except ValueError:
        return False
    return True


def _end_of_last_line(file: Any) -> int:
    """Return the position behind the last line end of a file, in bytes; 0 without one."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        line_end = file.read(end - start).rfind(b"\n")
        if line_end >= 0:
            return start + line_end + 1
        end = start
    return 0
