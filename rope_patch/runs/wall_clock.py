"""The wall clock: the budget's time, shared over steps, with the time of runs that were killed."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rope_patch.utils import atomic_files

_HEARTBEAT = 5.0  # seconds between two notes of the time, which is all that a kill can lose


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
