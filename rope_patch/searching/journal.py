"""The journal of a search: measurements on disk as they come, so that a killed search resumes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from rope_patch.inference.samples import samples_digest
from rope_patch.runs.journal import check_lines
from rope_patch.runs.run_folder import RunFolder
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.fitness import Evaluation, Fitness
from rope_patch.utils import atomic_files, checksums
from rope_patch.utils.processes import Processes

logger = logging.getLogger("rope_patch")

FORMAT = "rope_patch.searching/2"
JOURNAL_FILE = "state.jsonl"


class SearchJournal:
    """A folder's `state.jsonl`: the search's identity in line 1, then one line a measurement.

    Each line has a checksum and is on the disk before the next candidate is measured. A last line
    that a kill cut short is dropped. A measurement that is damaged or of another search is dropped
    with a warning and measured again. A file of another search, or one whose first line is damaged,
    is refused and left as it is. Nothing is written before the first measurement. The main process
    alone reads and writes; all processes of the search come to each method.

    Args:
        folder: The file's folder; None keeps everything in memory.
        identity: What measurements depend on, as plain data.
        processes: The processes of the search; this one alone unless given.

    Raises:
        ValueError: The file is of another search (the message names the differences), or its first
            line is damaged; in every process.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        identity: dict[str, Any],
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes(alone=True)
        self._run_folder = None if folder is None else RunFolder(Path(folder), identity)
        self._search_id = checksums.json_digest(identity)[:16]  # stands in each line
        self._entries: dict[str, dict[str, Any]] = {}
        self._pending: list[tuple[str, dict[str, Any]]] = []  # written with the next `put`
        self._valid_lines: list[bytes] = []  # the header among them
        self._has_header = self._is_damaged = self._has_warned = False
        self._held: contextlib.ExitStack | None = None  # the lock
        self._stack = contextlib.ExitStack()
        if (run_folder := self._run_folder) is not None:
            self.processes.run_on_main(lambda: self._read(run_folder))

    def __enter__(self) -> SearchJournal:
        if self._run_folder is not None:
            state = self._run_folder.path / JOURNAL_FILE
            advice = f"What was measured is kept in {state}: REMEDY, and the same command goes on"
            self._stack.enter_context(atomic_files.add_write_advice(f"{advice} from it"))
        self._stack.callback(self.close)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return what is stored under a key, or None."""
        return self.processes.run_on_main(lambda: self._entries.get(key))

    def stored_before(self, key: str) -> dict[str, dict[str, Any]]:
        """Return what was stored before a key; everything if it was not stored."""
        return self.processes.run_on_main(
            lambda: dict(takewhile(lambda entry: entry[0] != key, self._entries.items()))
        )

    def put(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Store a measurement.

        Returns:
            The measurement as JSON gives it back.

        Raises:
            ValueError: Another process works in the folder.
            OSError: The file could not be written, or the folder cannot be locked.
        """

        def write() -> dict[str, Any]:
            while self._pending:
                self._write(*self._pending.pop())
            return self._write(key, value)

        return self.processes.run_on_main(write)

    def put_with_next(self, key: str, value: dict[str, Any]) -> None:
        """Store a value together with the next measurement, unless the key is stored."""
        if self.get(key) is None:
            self._pending.append((key, value))

    def lock(self) -> None:
        """Lock the folder until `close`, and read what other processes have added before.

        Raises:
            ValueError: Another process works in the folder.
            OSError: The folder cannot be locked.
        """
        self.processes.run_on_main(self._lock)

    def close(self) -> None:
        """Release the folder's lock."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _lock(self) -> None:
        folder = self._run_folder
        if folder is None or self._held is not None:
            return
        with contextlib.ExitStack() as attempt:  # one that fails reads again before it writes
            attempt.enter_context(folder.locked())
            self._read(folder)  # other processes may have written since
            if self._is_damaged:
                folder.journal(JOURNAL_FILE).rewrite(self._valid_lines)
            self._held = attempt.pop_all()

    def _write(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        self._lock()
        sealed = checksums.seal({"search": self._search_id, "key": key, "value": value})
        self._entries[key] = sealed["value"]
        if self._run_folder is not None:
            header = checksums.seal({"format": FORMAT, "identity": self._run_folder.identity})
            new = [sealed] if self._has_header else [header, sealed]
            self._run_folder.journal(JOURNAL_FILE).append(*new)
            self._has_header = True
        return self._entries[key]

    def get_or_measure(
        self, key: str, candidate: Candidate | None, measure: Callable[[], Evaluation], **more: Any
    ) -> Evaluation:
        """Return the stored evaluation of a key, or measure and store it.

        Args:
            key: The evaluation's key.
            candidate: The candidate; None is the unpatched model.
            measure: Measures the candidate.
            **more: Values to store beside the evaluation.

        Raises:
            ValueError: The stored evaluation is of another candidate.
        """
        plain_candidate = candidate_to_dict(candidate)
        entry = self.get(key)
        if entry is None:
            evaluation = measure()
            self.put(
                key, {"candidate": plain_candidate, "evaluation": evaluation.to_dict(), **more}
            )
            return evaluation
        if entry["candidate"] != plain_candidate:
            raise ValueError(
                f"{key} was another candidate when this search began: {entry['candidate']!s:.200} "
                f"there and {plain_candidate!s:.200} now. Give another folder"
            )
        return Evaluation.from_dict(entry["evaluation"])

    def held_out_evaluation(self, fitness: Fitness, candidate: Candidate | None) -> Evaluation:
        """Return the evaluation on held-out samples, measured unless it is stored.

        Args:
            fitness: Measures on the held-out samples.
            candidate: The candidate, whatever its origin; None is the unpatched model.
        """
        plain = candidate_to_dict(candidate)
        rotation = json.dumps(
            [plain["method"], plain["options"]] if plain else None, sort_keys=True
        )
        key = f"held-out/{samples_digest(fitness.samples)}/{rotation}"
        entry = self.get(key)
        if entry is not None:
            return Evaluation.from_dict(entry["evaluation"])
        return self.get_or_measure(key, candidate, lambda: fitness.measure(candidate))

    def require_same_budget(self, method: str, budget: int, resumable: bool) -> None:
        """Raise if the budget has changed and the strategy's proposals depend on it."""
        first = self.get("search/1")
        if first is not None and first["budget"] != budget and not resumable:
            raise ValueError(
                f"{method} plans by its budget, which was {first['budget']} when the search in "
                f"this folder began, and is {budget} now: give the same budget, or another folder"
            )

    def _read(self, folder: RunFolder) -> None:
        if folder.path.exists() and not folder.path.is_dir():
            raise ValueError(f"{folder.path} is a file: expected a folder for the search's state")
        file = folder.journal(JOURNAL_FILE)
        lines = file.lines()
        self._entries, self._valid_lines = {}, []
        self._has_header = self._is_damaged = False
        if not lines:
            return  # a kill cut line 1 short: nothing was measured
        self._check_header(folder, lines[0])
        checked = check_lines(lines[1:], first=2, search=self._search_id)
        self._entries = {entry["key"]: entry["value"] for entry in checked.entries}
        self._valid_lines = [lines[0], *checked.valid]
        self._has_header = True
        self._is_damaged = bool(checked.flaws)
        if checked.flaws and not self._has_warned:  # `lock` reads the file a second time
            more = f" (and {len(checked.flaws) - 1} more)" if len(checked.flaws) > 1 else ""
            message = "%s: what was there is measured again: line %d%s: %s"
            number, flaw = checked.flaws[0]
            logger.warning(message, file.path, number, more, flaw)
            self._has_warned = True

    def _check_header(self, folder: RunFolder, line: bytes) -> None:
        """Raise unless the first line of a journal says that it is of this search."""
        path = folder.path / JOURNAL_FILE
        try:
            header = json.loads(line)
            if isinstance(header, dict) and header.get("format") == FORMAT:
                checksums.unseal(line)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged in line 1, which says what was searched ({error}): it was left "
                "as it is, so restore it, move it away or give another folder"
            ) from error
        found = header.get("format") if isinstance(header, dict) else None
        if found != FORMAT or not isinstance(header.get("identity"), dict):
            raise ValueError(
                f"{path} is not the state of a search of this version: expected format "
                f"{FORMAT!r}, got {found!r}; it was left as it is, so move it away or give another "
                "folder"
            )
        stored = header["identity"]
        if "config" in folder.identity and "config" not in stored:
            # 0.1 noted none: the file goes on, and its lines carry the identity without one.
            del folder.identity["config"]
            self._search_id = checksums.json_digest(folder.identity)[:16]
            logger.warning(
                "%s was begun by an earlier release, which did not note the model's config: it "
                "goes on with the config of now. If the config was edited since, give another "
                "folder",
                path,
            )
        text = "{name} is {old} there and {new} here"
        if differences := folder.differences(stored, text, show=json.dumps):
            raise ValueError(
                f"{path} is the state of another search: {'; '.join(differences.values())}. It was "
                "left as it is: give another folder, or ask for the same again"
            )


def candidate_to_dict(candidate: Candidate | None) -> dict[str, Any] | None:
    """Return a candidate as JSON gives it back."""
    return None if candidate is None else json.loads(json.dumps(vars(candidate)))
