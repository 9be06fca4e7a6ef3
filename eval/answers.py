"""Answers kept as they come, so that a run that was killed goes on without asking again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def key_of(*parts: Any) -> str:
    """A key for whatever identifies an answer: weights, patch, prompt, ..."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Answers:
    """Answers (dicts) by key, in files of JSON lines that only ever grow.

    Every answer is on the disk before the next question is asked. A line that was cut short by a
    kill is not an answer, and the next one starts on a line of its own. Several processes write
    files of their own and read those of all. A failure (`error` in the answer) is kept as well, and
    asked again by the next run.

    Args:
        folder: Where the files are; made if missing. None keeps answers in memory.
        rank: Of this process.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}
        self._own = None if folder is None else folder / f"answers-{rank}.jsonl"
        self.reload()

    def done(self, key: str) -> bool:
        """Whether there is an answer that is no failure."""
        return "error" not in self._known.get(key, {"error": "not asked"})

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._known[key]

    def reload(self) -> None:
        """Reads what this and other processes have written."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("answers-*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        entry = json.loads(line)
                        if not self.done(entry["key"]):
                            self._known[entry["key"]] = dict(entry["answer"])
                    except (ValueError, KeyError, TypeError):
                        continue  # half a line

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Keeps an answer; it is as JSON gives it back from then on."""
        line = json.dumps({"key": key, "answer": answer})
        self._known[key] = json.loads(line)["answer"]
        if self._own is None:
            return
        self._own.parent.mkdir(parents=True, exist_ok=True)
        with self._own.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the line before was cut short
                    line = f"\n{line}"
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
