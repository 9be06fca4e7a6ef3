"""What a search has measured, kept as it comes, so that one that was killed goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT = "rope_patch.searching/1"
FILE = "state.jsonl"
LOCK = ".state.lock"


class State:
    """A folder's `state.jsonl`: what is searched in the first line, then a line a measurement.

    Every line is on the disk before the next candidate is measured. What a kill left of a last line
    is dropped. Anything else that is wrong, and a file of another search, is refused and left as it
    is. Nothing is written before the first measurement.

    Args:
        folder: Where the file is; None keeps everything in memory.
        identity: What measurements depend on, as JSON can hold it.

    Raises:
        ValueError: The file is of another search (says what differs), is damaged (says where), or
            another process searches in this folder.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        self._path = None if folder is None else folder / FILE
        self._identity = json.loads(json.dumps(identity))
        self._lock: Any = None
        self._known: dict[str, dict[str, Any]] = {}
        self._whole = 0  # bytes of whole lines
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: expected a folder for the search's state")
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was kept under a key."""
        return self._known.get(key)

    def put(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Keeps a measurement.

        Returns:
            It, as JSON gives it back.
        """
        line = json.dumps({"key": key, "value": value})
        self._known[key] = json.loads(line)["value"]
        if self._path is not None:
            self._append(self._path, line)
        return self._known[key]

    def close(self) -> None:
        """Lets others search in this folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def lock(self) -> None:
        """Keeps others from searching in this folder until `close`.

        Raises:
            ValueError: Another process does already.
        """
        if self._path is None or self._lock is not None:
            return
        from filelock import FileLock, Timeout

        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._path.with_name(LOCK))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"another process searches in {self._path.parent}: wait for it, or give another "
                "folder"
            ) from None
        self._lock = lock
        if self._path.exists():  # it may have grown since
            self._read(self._path)

    def _append(self, path: Path, line: str) -> None:
        self.lock()
        new = not self._whole
        if new:
            line = json.dumps({"format": FORMAT, "identity": self._identity}) + "\n" + line
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(self._whole)  # without what a kill left of a line
            file.seek(self._whole)
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
            self._whole = file.tell()
        if new and os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        lines = raw.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            return  # killed while the first line was written: nothing was measured
        self._require_same(path, _parsed(path, 1, lines[0]))
        for number, line in enumerate(lines[1:], start=2):
            entry = _parsed(path, number, line)
            try:
                self._known[entry["key"]] = dict(entry["value"])
            except (KeyError, TypeError, ValueError):
                raise _damaged(path, number) from None
        self._whole = sum(map(len, lines))

    def _require_same(self, path: Path, header: dict[str, Any]) -> None:
        if header.get("format") != FORMAT or not isinstance(header.get("identity"), dict):
            raise ValueError(
                f"{path} is not the state of a search of this version: expected format "
                f"{FORMAT!r}, got {header.get('format')!r}; it was left as it is, so move it away "
                "or give another folder"
            )
        there = header["identity"]
        names = dict.fromkeys([*there, *self._identity])
        differ = [
            f"{name} is {_short(there.get(name))} there and {_short(self._identity.get(name))} here"
            for name in names
            if there.get(name) != self._identity.get(name)
        ]
        if differ:
            raise ValueError(
                f"{path} is the state of another search: {'; '.join(differ)}. It was left as it "
                "is: give another folder, or ask for the same again"
            )


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        raise _damaged(path, number) from None
    if not isinstance(found, dict):
        raise _damaged(path, number)
    return found


def _damaged(path: Path, number: int) -> ValueError:
    return ValueError(
        f"{path} is damaged in line {number}: expected a measurement of a search; it was left as "
        f"it is. Keep its first {number - 1} lines to go on from there, or give another folder"
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
