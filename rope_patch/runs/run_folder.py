"""The folder of a run: what the same run needs to go on after a kill."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rope_patch.runs.journal import JournalFile
from rope_patch.utils import atomic_files, checksums
from rope_patch.utils.processes import Processes

logger = logging.getLogger("rope_patch")

LOCK, CLOCK = ".lock", "clock.json"  # an empty file, and the seconds of each step
_HEARTBEAT = 5.0  # seconds between two notes of the time: a kill loses at most as much
_LONGEST, _SHOWN = 160, 140  # characters of a value in an error, and of one that is cut


class RunFolder:
    """A folder that one run at a time writes to, and from which the same run goes on.

    Args:
        path: The folder; made by what is written first.
        identity: Everything that the run's results depend on, as plain data; empty where each
            stored result says itself what it depends on.

    Attributes:
        path: The folder.
        identity: The identity as JSON gives it back.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity or {}))

    @contextlib.contextmanager
    def locked(self, processes: Processes | None = None) -> Iterator[None]:
        """Keep other runs out while the block runs, or raise at once.

        The operating system holds the lock, so it ends with the process, however that ends.

        Args:
            processes: Those of the run, all of which have to come here; this one alone if None.

        Raises:
            ValueError: Another run works in the folder; in every process.
            OSError: The folder cannot be written to, or its file system has no locks; likewise.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / LOCK)

        def acquire() -> None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(
                    f"another process works in {self.path}: wait for it to end, or give another "
                    "folder"
                ) from None
            except (OSError, NotImplementedError) as error:
                raise OSError(
                    f"{self.path} cannot be locked against other runs ({error}): expected a folder "
                    "that can be written to, on a file system with locks; give another folder"
                ) from error

        (processes or Processes(alone=True)).run_on_main(acquire)
        try:
            yield
        finally:
            lock.release()

    def journal(self, name: str) -> JournalFile:
        """Return an append-only file of the folder, whose lines are on the disk one by one."""
        return JournalFile(self.path / name)

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        """Write a result to the disk: all of it or nothing, with a checksum.

        Args:
            name: The file's name.
            result: JSON data, with what tells it from other results, such as its format.

        Raises:
            NotWritten: The result could not be written.
        """
        path = self.path / name
        atomic_files.write_json(path, checksums.seal(dict(result)))
        atomic_files.sync(path)
        atomic_files.sync(path.parent)

    def read(self, name: str, **entries: Any) -> dict[str, Any]:
        """Return a stored result.

        Args:
            name: The file's name.
            **entries: Entries that the result must have as given.

        Raises:
            OSError: There is no such file, or it cannot be read.
            ValueError: The result is damaged, or another one; says which.
        """
        return checksums.unseal((self.path / name).read_bytes(), **entries)

    def find(self, name: str, again: str, **entries: Any) -> dict[str, Any] | None:
        """Return a stored result; None if it is missing, or damaged, which is logged as a warning.

        Args:
            name: The file's name.
            again: What is done if it is damaged, for the warning: "made again".
            **entries: See `read`.
        """
        try:
            return self.read(name, **entries)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s is %s: %s", self.path / name, again, error)
            return None

    def differences(
        self,
        stored: Mapping[str, Any],
        text: str = "{name} was {old}, got {new}",
        *,
        show: Callable[[Any], str] = repr,
        compared: Callable[[Any], Any] = lambda value: value,
    ) -> dict[str, str]:
        """Return what a stored identity has otherwise than this run, by name, each in one line.

        Args:
            stored: The identity that the folder was begun with.
            text: The line; {name}, {old} and {new} are filled in.
            show: Writes a value; a long text is cut.
            compared: Returns the part of a value that is compared.
        """
        old, new = stored, self.identity
        return {
            name: text.format(
                name=name, old=_cut(show(old.get(name))), new=_cut(show(new.get(name)))
            )
            for name in dict.fromkeys([*old, *new])
            if compared(old.get(name)) != compared(new.get(name))
        }

    def clock(self, budget: float, weights: Mapping[str, float]) -> WallClock:
        """Return the time of the run's steps, with that of runs that were killed."""
        return WallClock(self.path / CLOCK, budget, weights)


class WallClock:
    """The time of all steps, noted in a file so that a killed run's time is shown, too.

    A step's share is of the time that the steps before it needed, without what kills cut short, and
    it is fixed when the step begins first. So a run that continues plans with the same share, and
    gives the same result.

    Args:
        path: The file.
        budget: Seconds for all steps together.
        weights: The share of each step, in the order of the steps; they need not sum to 1.
    """

    def __init__(self, path: Path, budget: float, weights: Mapping[str, float]) -> None:
        self._path, self.budget, self._weights = path, budget, dict(weights)
        self._spent: dict[str, float] = {}
        self._allotted: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, KeyError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            self._spent, self._allotted = dict(stored["spent"]), dict(stored["allotted"])

    def allot(self, step: str, used: float) -> float:
        """Return the seconds that a step may take.

        Args:
            step: Its name.
            used: Seconds that the steps before it needed.
        """
        if step not in self._allotted:
            names = list(self._weights)
            later = names[names.index(step) :]
            left = max(0.0, self.budget - used)
            share = self._weights[step] / sum(self._weights[name] for name in later)
            self._allotted[step] = left * share
            self._write()
        return self._allotted[step]

    def spent(self, step: str | None = None) -> float:
        """Return the seconds of a step, or of all of them."""
        return sum(self._spent.values()) if step is None else self._spent.get(step, 0.0)

    def allotted(self, step: str) -> float:
        """Return the seconds that a step may take, 0 before it began."""
        return self._allotted.get(step, 0.0)

    @contextlib.contextmanager
    def running(self, step: str, show: Callable[[], None]) -> Iterator[None]:
        """Count the time of the block as a step's.

        Args:
            step: The step.
            show: Called every few seconds, when the time was noted; from a thread of its own.
        """
        ended, before, started = threading.Event(), self.spent(step), time.monotonic()

        def note() -> None:
            self._spent[step] = before + time.monotonic() - started
            self._write()

        def beat() -> None:
            while not ended.wait(_HEARTBEAT):
                with contextlib.suppress(OSError):  # the step itself reports a full disk
                    note()
                    show()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            note()

    def _write(self) -> None:
        atomic_files.write_json(self._path, {"spent": self._spent, "allotted": self._allotted})


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_SHOWN]}... ({len(text)} characters)"
