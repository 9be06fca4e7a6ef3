"""What is asked of long prompts: retrieval tasks with their controls, as often as it takes."""

from __future__ import annotations

from typing import Any

from rope_patch.eval import files, retrieval, statistics
from rope_patch.eval.request import BASELINE
from rope_patch.eval.session import Session

_FIRST = 10  # samples at a length that a precision starts with
_CONTROLS = 6  # samples without their answer, which should all fail


class RetrievalRun:
    """The retrieval samples of one evaluation, and their scores under each method.

    Args:
        session: The model; its weights need not be there yet.

    Raises:
        ValueError: Samples that cannot be built.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        request = session.request
        self.names = request.retrieval
        first = request.samples
        if first is None:
            first = len(request.depths)
            if request.precision:
                first = min(_FIRST, request.max_samples)
        at = [(name, length) for name in self.names for length in request.lengths]
        self.counts = dict.fromkeys(at, first)
        self.built = {(n, length): self._build(n, length, first) for n, length in at}
        self.scores: dict[str, dict[str, dict[int, list[dict[str, Any]]]]] = {}
        self.controls: list[dict[str, Any]] = []

    def measure_plain(self) -> None:
        """Questions to texts without their answer, at the shortest length."""
        request = self.session.request
        length, depths = min(request.lengths), list(request.depths)
        for name in self.names if request.controls else []:
            try:
                task = self._build(name, length, _CONTROLS, planted=False)
            except ValueError as error:
                self.session.not_run.append(f"control of {name}: {error}")
                continue
            rows = self._ask(task, f"{name} without its answer")
            entry = {"task": name, "lengths": [length], "depths": depths}
            self.controls.append({**entry, "samples": {BASELINE: rows}})

    def measure(self, label: str, place: str) -> None:
        """All samples under the method that the model has now."""
        for at in self.built:
            self._measure(at, label, place)

    def measure_more(self) -> None:
        """More samples, under every method, until intervals are as narrow as was asked for."""
        request = self.session.request
        while wanting := self.session.processes.same(self._wanting()):
            for name, length in wanting:
                count = min(2 * self.counts[name, length], request.max_samples)
                self.counts[name, length] = count
                self.built[name, length] = self._build(name, length, count)
            for method in request.methods:
                with self.session.patched(method) as label:
                    for at in wanting:
                        self._measure(at, label, f"{label}, {self.counts[at]} samples")

    def results(self) -> list[dict[str, Any]]:
        """The part `retrieval` of the results."""
        request = self.session.request
        found = []
        for name, by_label in self.scores.items():
            samples = {
                label: [row for length in request.lengths for row in rows[length]]
                for label, rows in by_label.items()
            }
            entry = {"task": name, "lengths": list(request.lengths)}
            found.append({**entry, "depths": list(request.depths), "samples": samples})
        return found

    def _build(self, name: str, length: int, count: int, planted: bool = True) -> Any:
        request = self.session.request
        given: dict[str, Any] = {"seed": request.seed}
        if request.per_text:
            given["per_text"] = request.per_text
        if request.haystacks:
            given["text"] = list(request.haystacks)
        if request.questions:
            given["questions"] = request.questions
        if not planted:
            given["planted"] = False
        tokenizer, depths = self.session.tokenizer, list(request.depths)
        return retrieval.build(name, tokenizer, [length], count, depths, **given)[0]

    def _measure(self, at: tuple[str, int], label: str, place: str) -> None:
        name, length = at
        with self.session.timed(name):
            rows = self._ask(
                self.built[at], f"{place}, {name} at {length:,}", f"{label}-{name}-{length}"
            )
        self.scores.setdefault(name, {}).setdefault(label, {})[length] = rows

    def _ask(self, task: Any, place: str, name: str = "") -> list[dict[str, Any]]:
        """Every sample's score by the model as it is now; lm-eval's results are kept by name."""
        folder = self.session.request.folder / "lm_eval"
        path = folder / f"{files.plain(name)}.json" if name else None
        with self.session.language_model(place) as lm:
            return retrieval.scores(retrieval.evaluate(lm, [task], path), lm.failures)

    def _wanting(self) -> list[tuple[str, int]]:
        """Tasks and lengths whose interval is too wide, under any of the methods."""
        precision, most = self.session.request.precision, self.session.request.max_samples
        if precision is None:
            return []
        return [
            (name, length)
            for (name, length), count in self.counts.items()
            if count < most
            and any(
                not _settled(rows.get(length) or [], precision)
                for rows in self.scores[name].values()
            )
        ]


def _settled(rows: list[dict[str, Any]], precision: float) -> bool:
    scores = [row["score"] for row in rows]
    if all(score is None for score in scores):
        return True  # more of what fails would fail as well
    interval = statistics.accuracy(scores, [row["text"] for row in rows])
    return statistics.settled(interval, precision)
