"""Answers kept as they come, so that a run that was killed goes on without asking again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from rope_patch.utils import atomic_files, checksums

logger = logging.getLogger("rope_patch")


def answer_key(*parts: Any) -> str:
    """A key for whatever identifies an answer: weights, patch, prompt, ..."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class AnswerStore:
    """Answers (dicts) by key, in files of JSON lines that only ever grow.

    Every answer is on the disk before the next question is asked. Each line is sealed, so one that
    is damaged is not an answer: it is warned of, asked again, and dropped from the file when the
    next run starts. A line that was cut short by a kill is dropped without a warning. Several
    processes write files of their own and read those of all. A failure (`error` in the answer) is
    kept as well, and asked again by the next run.

    Args:
        folder: Where the files are; made if missing. None keeps answers in memory.
        rank: Of this process.
        size: How many processes there are.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, size: int = 1) -> None:
        self._folder = folder
        self._answers: dict[str, dict[str, Any]] = {}
        self._own_file = None if folder is None else folder / f"answers-{rank}.jsonl"
        for path in self._files():
            owner = path.stem.removeprefix("answers-")
            mine = owner == str(rank) or (rank == 0 and owner not in map(str, range(size)))
            self._load(path, repair=mine)

    def is_answered(self, key: str) -> bool:
        """Whether there is an answer that is no failure."""
        return "error" not in self._answers.get(key, {"error": "not asked"})

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._answers[key]

    def reload(self) -> None:
        """Reads what this and other processes have written."""
        for path in self._files():
            self._load(path, repair=False)

    def _files(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob("answers-*.jsonl"))

    def _load(self, path: Path, *, repair: bool) -> None:
        """Read one file.

        Args:
            path: The file.
            repair: Whether to warn of what is damaged and to drop it.
        """
        lines = path.read_bytes().split(b"\n")
        whole, flaws = [], []
        for number, line in enumerate(lines, start=1):
            try:
                entry = checksums.unseal(line)
            except ValueError as error:
                if line:
                    flaws.append((number, str(error)))
                continue
            whole.append(line)
            if not self.is_answered(entry["key"]):
                self._answers[entry["key"]] = entry["answer"]
        if not flaws or not repair:
            return
        atomic_files.atomic_write(path, b"".join(line + b"\n" for line in whole))
        if flaws[-1][0] == len(lines):
            flaws.pop()  # what a kill left of the last line
        if flaws:
            logger.warning(
                "%s: %d of %d answers are asked again: line %d: %s",
                path,
                len(flaws),
                len(flaws) + len(whole),
                *flaws[0],
            )

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Keeps an answer; it is as JSON gives it back from then on."""
        sealed = checksums.seal({"key": key, "answer": answer})
        self._answers[key] = sealed["answer"]
        if self._own_file is not None:
            with atomic_files.explain_write_errors(self._own_file.parent, self._own_file.name):
                _append_line(self._own_file, json.dumps(sealed))


def _append_line(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the line before was cut short
                line = f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
