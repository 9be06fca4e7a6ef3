"""The store of a model's answers, from which a killed run resumes without asking again."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from rope_patch.utils import atomic_files, checksums

logger = logging.getLogger("rope_patch")


def answer_key(*parts: Any) -> str:
    """Return the key of an answer.

    Args:
        *parts: All that identifies the answer, as plain data: weights, patch, prompt, ...
    """
    text = json.dumps(parts, sort_keys=True, default=str)
    return checksums.digest(text, 32)


class AnswerStore:
    """Answers (dicts) by key, in append-only files of JSON lines.

    Each answer is on the disk before the next question is asked, and each line has a checksum. A
    damaged line is dropped with a warning when the next run starts, and its question asked again. A
    line that a kill cut short is dropped without a warning. Each process writes a file of its own
    and reads those of all. A failure (`error` in the answer) is stored, too, and asked again by the
    next run.

    Args:
        folder: The files' folder; created if missing. None keeps answers in memory.
        rank: The rank of this process.
        size: The number of processes.
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
        """Return whether there is an answer without an error."""
        return "error" not in self._answers.get(key, {"error": "not asked"})

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._answers[key]

    def reload(self) -> None:
        """Read the answers that this and other processes have written."""
        for path in self._files():
            self._load(path, repair=False)

    def _files(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob("answers-*.jsonl"))

    def _load(self, path: Path, *, repair: bool) -> None:
        """Read one file.

        Args:
            path: The file.
            repair: Whether to drop damaged lines from it, with a warning.
        """
        lines = path.read_bytes().split(b"\n")
        valid_lines, flaws = [], []
        for number, line in enumerate(lines, start=1):
            try:
                entry = checksums.unseal(line)
            except ValueError as error:
                if line:
                    flaws.append((number, str(error)))
                continue
            valid_lines.append(line)
            if not self.is_answered(entry["key"]):
                self._answers[entry["key"]] = entry["answer"]
        if not flaws or not repair:
            return
        atomic_files.atomic_write(path, b"".join(line + b"\n" for line in valid_lines))
        if flaws[-1][0] == len(lines):
            flaws.pop()  # a kill cut the last line short
        if flaws:
            logger.warning(
                "%s: %d of %d answers are asked again: line %d: %s",
                path,
                len(flaws),
                len(flaws) + len(valid_lines),
                *flaws[0],
            )

    def put(self, key: str, answer: dict[str, Any]) -> None:
        """Store an answer; from then on it is what JSON gives back."""
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
