"""What a search has measured, kept as it comes, so that one that was killed goes on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rope_patch.inference.samples import Sample, samples_digest
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.measure.fitness import Evaluation, Fitness
from rope_patch.utils import atomic_files, checksums
from rope_patch.utils.folder_lock import FolderLock
from rope_patch.utils.processes import Processes


class SharedJournal:
    """What was measured so far, the same in every process.

    Args:
        folder: Where the main process keeps it; None keeps it in memory.
        identity: See `SearchJournal`.
        processes: Those that search.

    Raises:
        ValueError: See `SearchJournal`; in every process.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        identity: dict[str, Any],
        processes: Processes,
    ) -> None:
        self.processes = processes
        self._pending: list[tuple[str, dict[str, Any]]] = []  # kept with the first measurement
        self._journal: Any = None

        def begin() -> None:
            self._journal = SearchJournal(None if folder is None else Path(folder), identity)

        self.processes.run_on_main(begin)

    def __enter__(self) -> SharedJournal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()

    def lock(self) -> None:
        """See `SearchJournal.lock`."""
        self.processes.run_on_main(lambda: self._journal.lock())

    def get(self, key: str) -> dict[str, Any] | None:
        """What was kept under a key."""
        return self.processes.run_on_main(lambda: self._journal.get(key))

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keeps something."""

        def write() -> None:
            while self._pending:
                self._journal.put(*self._pending.pop())
            self._journal.put(key, value)

        self.processes.run_on_main(write)

    def get_or_measure(
        self, key: str, candidate: Candidate | None, measure: Callable[[], Evaluation], **more: Any
    ) -> Evaluation:
        """An evaluation, measured unless it was kept.

        Args:
            key: Its name.
            candidate: Of what.
            measure: Does it.
            **more: To keep beside it.

        Raises:
            ValueError: Under this name is one of another candidate.
        """
        said = candidate_to_dict(candidate)
        known = self.get(key)
        if known is None:
            found = measure()
            self.put(key, {"candidate": said, "evaluation": found.to_dict(), **more})
            return found
        if known["candidate"] != said:
            raise ValueError(
                f"{key} was another candidate when this search began: {known['candidate']!s:.200} "
                f"there and {said!s:.200} now. Give another folder"
            )
        return Evaluation.from_dict(known["evaluation"])

    def held_out_evaluation(self, on: Fitness, candidate: Candidate | None) -> Evaluation:
        """An evaluation on held-out samples."""
        said = candidate_to_dict(candidate)
        what = json.dumps([said["method"], said["options"]] if said else None, sort_keys=True)
        key = f"held-out/{samples_digest(on.samples)}/{what}"
        known = self.get(key)
        if known is not None:
            return Evaluation.from_dict(known["evaluation"])
        return self.get_or_measure(key, candidate, lambda: on.measure(candidate))

    def require_same_budget(self, method: str, budget: int, continues: bool) -> None:
        """Refuses another budget than before where proposals depend on it."""
        known = self.get("search/1")
        if known is not None and known["budget"] != budget and not continues:
            raise ValueError(
                f"{method} plans by its budget, which was {known['budget']} when the search in "
                f"this folder began, and is {budget} now: give the same budget, or another folder"
            )

    def get_sanity(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any] | None:
        """What was found about the model at its trained length."""
        return self.get(f"able/{kind}/{samples_digest(samples)}")

    def put_sanity(self, kind: str, samples: Sequence[Sample], said: dict[str, Any]) -> None:
        """Keeps that, along with the first measurement of the search."""
        key = f"able/{kind}/{samples_digest(samples)}"
        if self.get(key) is None:
            self._pending.append((key, said))

    @staticmethod
    def reference_candidate(method: str) -> Candidate:
        """A method by its name."""
        return Candidate(method, method)


def candidate_to_dict(candidate: Candidate | None) -> dict[str, Any] | None:
    """As JSON gives it back."""
    return None if candidate is None else json.loads(json.dumps(vars(candidate)))


logger = logging.getLogger("rope_patch")

FORMAT = "rope_patch.searching/2"
_FORMAT_WITHOUT_DIGESTS = "rope_patch.searching/1"  # its lines had no digests
JOURNAL_FILE = "state.jsonl"


class SearchJournal:
    """A folder's `state.jsonl`: what is searched in the first line, then a line a measurement.

    Every line is on the disk before the next candidate is measured, and sealed. What a kill left of
    a last line is dropped. A measurement that is damaged or of another search is warned of, dropped
    and measured again. A file of another search, and one whose first line is damaged, is refused
    and left as it is. Nothing is written before the first measurement.

    Args:
        folder: Where the file is; None keeps everything in memory.
        identity: What measurements depend on, as JSON can hold it.

    Raises:
        ValueError: The file is of another search (says what differs), its first line is damaged, or
            another process works in this folder.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        self._path = None if folder is None else folder / JOURNAL_FILE
        self._identity = json.loads(json.dumps(identity))
        self._search_id = checksums.json_digest(self._identity)[
            :16
        ]  # by which a line tells its search
        self._repaired: bytes | None = None  # the file without what is damaged in it
        self._has_warned = False
        self._lock = None if folder is None else FolderLock(folder)
        self._entries: dict[str, dict[str, Any]] = {}
        self._valid_bytes = 0  # bytes of whole lines
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: expected a folder for the search's state")
        if self._path is not None:
            self._read(self._path)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return what was kept under a key."""
        return self._entries.get(key)

    def put(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Keep a measurement.

        Returns:
            It, as JSON gives it back.

        Raises:
            ValueError: Another process works in the folder.
            OSError: It could not be written, or the folder cannot be locked.
        """
        self.lock()
        sealed = checksums.seal({"search": self._search_id, "key": key, "value": value})
        self._entries[key] = sealed["value"]
        if self._path is not None:
            with atomic_files.explain_write_errors(self._path.parent, self._path.name):
                self._append(self._path, json.dumps(sealed))
        return self._entries[key]

    @staticmethod
    def resume_advice(folder: str | os.PathLike[str] | None) -> str:
        """Return what is left and how to go on if a file cannot be written: see `disk.advising`."""
        if folder is None:
            return ""
        state = Path(folder) / JOURNAL_FILE
        return f"What was measured is kept in {state}: REMEDY, and the same command goes on from it"

    def close(self) -> None:
        """Let others search in this folder."""
        if self._lock is not None:
            self._lock.release()

    def lock(self) -> None:
        """Keep others from working in this folder until `close`, and read what they have added.

        Raises:
            ValueError: Another process does already.
            OSError: The folder cannot be locked.
        """
        if self._path is None or self._lock is None or self._lock.is_held:
            return
        self._lock.acquire()
        try:
            self._read(self._path)  # others may have written since
            if self._repaired is not None:
                atomic_files.atomic_write(self._path, self._repaired)
        except BaseException:
            self._lock.release()  # so that what comes next reads again before it writes
            raise

    def _append(self, path: Path, line: str) -> None:
        new = not self._valid_bytes
        if new:
            header = checksums.seal({"format": FORMAT, "identity": self._identity})
            line = json.dumps(header) + "\n" + line
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(self._valid_bytes)  # without what a kill left of a line
            file.seek(self._valid_bytes)
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
            self._valid_bytes = file.tell()
        if new and os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def _read(self, path: Path) -> None:
        self._entries, self._valid_bytes, self._repaired = {}, 0, None
        raw = path.read_bytes() if path.exists() else b""
        lines = raw.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            return  # killed while the first line was written: nothing was measured
        header = _parse_header(path, lines[0])
        self._require_same_identity(path, header)
        if header["format"] == _FORMAT_WITHOUT_DIGESTS:
            self._warn(path, [(1, "it has no digests: earlier versions wrote none")])
            return
        whole, flaws = lines[:1], []
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = checksums.unseal(line, search=self._search_id)
            except ValueError as error:
                flaws.append((number, str(error)))
            else:
                self._entries[entry["key"]] = entry["value"]
                whole.append(line)
        if flaws:
            self._warn(path, flaws)
            self._repaired = b"".join(whole)
        self._valid_bytes = sum(map(len, whole))

    def _warn(self, path: Path, flaws: list[tuple[int, str]]) -> None:
        if not self._has_warned:  # `lock` reads again
            more = f" (and {len(flaws) - 1} more)" if len(flaws) > 1 else ""
            logger.warning(
                "%s: what was there is measured again: line %d%s: %s",
                path,
                flaws[0][0],
                more,
                flaws[0][1],
            )
        self._has_warned = True

    def _require_same_identity(self, path: Path, header: dict[str, Any]) -> None:
        formats = (FORMAT, _FORMAT_WITHOUT_DIGESTS)
        if header.get("format") not in formats or not isinstance(header.get("identity"), dict):
            raise ValueError(
                f"{path} is not the state of a search of this version: expected format "
                f"{FORMAT!r}, got {header.get('format')!r}; it was left as it is, so move it away "
                "or give another folder"
            )
        there = header["identity"]
        names = dict.fromkeys([*there, *self._identity])
        differ = [
            f"{name} is {_abbreviate(there.get(name))} there and {_abbreviate(self._identity.get(name))} here"
            for name in names
            if there.get(name) != self._identity.get(name)
        ]
        if differ:
            raise ValueError(
                f"{path} is the state of another search: {'; '.join(differ)}. It was left as it "
                "is: give another folder, or ask for the same again"
            )


def _parse_header(path: Path, line: bytes) -> dict[str, Any]:
    """Return what the first line says.

    Raises:
        ValueError: It is damaged.
    """
    try:
        header = json.loads(line)
        if isinstance(header, dict) and header.get("format") == FORMAT:
            checksums.unseal(line)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged in line 1, which says what was searched ({error}): it was left as "
            "it is, so restore it, move it away or give another folder"
        ) from error
    return header if isinstance(header, dict) else {}


def _abbreviate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
