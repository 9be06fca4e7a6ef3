"""The store of a model's answers, from which a killed run resumes without asking again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rope_patch.runs.journal import JournalFile, check_lines
from rope_patch.utils import checksums

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

    Attributes:
        untimed: Answers of an earlier run that were claimed, but have no seconds.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, size: int = 1) -> None:
        self._folder, self._size = folder, size
        self._answers: dict[str, dict[str, Any]] = {}
        self._earlier: dict[str, float | None] = {}  # an earlier run's answers: their seconds
        self._seconds: dict[str, float] = {}  # seconds of each answer, earlier runs' among them
        self.untimed = 0
        self._journal = None if folder is None else JournalFile(folder / f"answers-{rank}.jsonl")
        for path in self._files():
            owner = path.stem.removeprefix("answers-")
            mine = owner == str(rank) or (rank == 0 and owner not in map(str, range(size)))
            self._load(path, repair=mine)

    def is_answered(self, key: str) -> bool:
        """Return whether there is an answer without an error."""
        return "error" not in self._answers.get(key, {"error": "not asked"})

    def missing(self, questions: Iterable[Any]) -> list[Any]:
        """Return those questions, by their `key`, that have no answer without an error."""
        return [question for question in questions if not self.is_answered(question.key)]

    def has_failed(self, key: str) -> bool:
        """Return whether the question was asked and failed."""
        return "error" in self._answers.get(key, {})

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._answers[key]

    def claim_earlier_seconds(self, keys: Iterable[str]) -> float:
        """Return the seconds of those answers that an earlier run left; each counts once."""
        claimed = [self._earlier.pop(key) for key in dict.fromkeys(keys) if key in self._earlier]
        self.untimed += claimed.count(None)
        return sum(seconds or 0.0 for seconds in claimed)

    def claim_seconds(self, keys: Iterable[str]) -> float:
        """Return the stored seconds of answers, whichever run gave them; each counts once.

        A run that continues returns what it would have returned without a stop.
        """
        return sum(self._seconds.pop(key, 0.0) for key in dict.fromkeys(keys))

    def reload(self) -> None:
        """Read the answers that this and other processes have written."""
        for path in self._files():
            self._load(path, repair=False, by_earlier_run=False)

    def _files(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob("answers-*.jsonl"))

    def _load(self, path: Path, *, repair: bool, by_earlier_run: bool = True) -> None:
        """Read the answers of one file; with `repair`, drop its damaged lines with a warning."""
        journal = JournalFile(path)
        checked = check_lines(journal.lines())
        for entry in checked.entries:
            if not self.is_answered(entry["key"]):
                self._answers[entry["key"]] = entry["answer"]
                if by_earlier_run and "error" not in entry["answer"]:
                    self._earlier[entry["key"]] = entry.get("seconds")
                    self._seconds[entry["key"]] = entry.get("seconds") or 0.0
        if checked.flaws and repair:
            journal.rewrite(checked.valid)
            logger.warning(
                "%s: %d of %d answers are asked again: line %d: %s",
                path,
                len(checked.flaws),
                len(checked.flaws) + len(checked.valid),
                *checked.flaws[0],
            )

    def put(self, key: str, answer: dict[str, Any], seconds: float | None = None) -> None:
        """Store an answer; from then on it is what JSON gives back.

        Args:
            key: From `answer_key`.
            answer: Plain data.
            seconds: Time that it took here; its share is stored, as processes work at the same
                time. Files of earlier versions have none.
        """
        entry: dict[str, Any] = {"key": key, "answer": answer}
        if seconds is not None:
            entry["seconds"] = round(seconds / self._size, 3)
            if "error" not in answer:  # the next run asks again
                self._seconds[key] = entry["seconds"]
        sealed = checksums.seal(entry)
        self._answers[key] = sealed["answer"]
        if self._journal is not None:
            self._journal.append(sealed)
