"""A search's measurements in several processes: the main one keeps them, all know them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rope_patch.eval.processes import Processes
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.fitness import Evaluation, Fitness
from rope_patch.searching.samples import Sample, digest
from rope_patch.searching.state import State


class Kept:
    """What was measured so far, the same in every process.

    Args:
        folder: Where the main process keeps it; None keeps it in memory.
        identity: See `State`.
        processes: Those that search.

    Raises:
        ValueError: See `State`; in every process.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        identity: dict[str, Any],
        processes: Processes,
    ) -> None:
        self.processes = processes
        self._notes: list[tuple[str, dict[str, Any]]] = []  # kept with the first measurement
        self._state: Any = None

        def begin() -> None:
            self._state = State(None if folder is None else Path(folder), identity)

        self.processes.together(begin)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.close()

    def lock(self) -> None:
        """See `State.lock`."""
        self.processes.together(lambda: self._state.lock())

    def get(self, key: str) -> dict[str, Any] | None:
        """What was kept under a key."""
        return self.processes.together(lambda: self._state.get(key))

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keeps something."""

        def write() -> None:
            while self._notes:
                self._state.put(*self._notes.pop())
            self._state.put(key, value)

        self.processes.together(write)

    def evaluation(
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
        said = plain(candidate)
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
        return Evaluation.of(known["evaluation"])

    def judged(self, on: Fitness, candidate: Candidate | None) -> Evaluation:
        """An evaluation on held-out samples."""
        said = plain(candidate)
        what = json.dumps([said["method"], said["options"]] if said else None, sort_keys=True)
        key = f"held-out/{digest(on.samples)}/{what}"
        known = self.get(key)
        if known is not None:
            return Evaluation.of(known["evaluation"])
        return self.evaluation(key, candidate, lambda: on.measure(candidate))

    def require_budget(self, method: str, budget: int, continues: bool) -> None:
        """Refuses another budget than before where proposals depend on it."""
        known = self.get("search/1")
        if known is not None and known["budget"] != budget and not continues:
            raise ValueError(
                f"{method} plans by its budget, which was {known['budget']} when the search in "
                f"this folder began, and is {budget} now: give the same budget, or another folder"
            )

    def about(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any] | None:
        """What was found about the model at its trained length."""
        return self.get(f"able/{kind}/{digest(samples)}")

    def note(self, kind: str, samples: Sequence[Sample], said: dict[str, Any]) -> None:
        """Keeps that, along with the first measurement of the search."""
        key = f"able/{kind}/{digest(samples)}"
        if self.get(key) is None:
            self._notes.append((key, said))

    @staticmethod
    def known(method: str) -> Candidate:
        """A method by its name."""
        return Candidate(method, method)


def plain(candidate: Candidate | None) -> dict[str, Any] | None:
    """As JSON gives it back."""
    return None if candidate is None else json.loads(json.dumps(vars(candidate)))
