"""The search loop: ask for a candidate, measure it, store the result, tell the strategy."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Protocol

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.fitness import Evaluation, Fitness
from rope_patch.searching.journal import SearchJournal, candidate_to_dict
from rope_patch.searching.strategies.base import Proposals
from rope_patch.utils.terminal import progress_bar

# Digits of a rotation's key: more than strategies have, so every proposal is measured.
_KEY_DIGITS = 9


def search_loop(
    fitness: Fitness,
    proposals: Proposals,
    budget: int,
    journal: SearchJournal,
    progress: Progress,
    seconds: float = math.inf,
) -> tuple[Candidate, list[dict[str, Any]], float]:
    """Search until the budget is spent or the strategy has no more proposals.

    YaRN is measured first, under number 0. So the result is never worse than YaRN on these samples,
    and early stopping has a reference from the start. Each rotation is measured once.

    Args:
        fitness: Measures candidates.
        proposals: The strategy; only the main process asks it.
        budget: Candidates at most.
        journal: Stores evaluations; stored ones are not measured again.
        progress: Updated after each evaluation.
        seconds: Time of all evaluations together, as it is stored with each; no candidate begins
            that would end later if it took as long as the longest one so far.

    Returns:
        The best candidate, the history as in `SearchResult.history`, and evaluations per minute.

    Raises:
        ValueError: Not one candidate could be measured.
    """
    history: list[dict[str, Any]] = []
    best: tuple[Candidate, Evaluation] | None = None
    evaluations: dict[Hashable, Evaluation] = {}
    measured_count, measured_seconds, longest = 0, 0.0, 0.0
    candidate: Candidate | None = Candidate("yarn", "yarn")
    reference = math.nan
    while candidate is not None:
        number, rotation, current = len(history), _rotation_key(fitness, candidate), candidate
        best_so_far = best[1] if best else None

        def measure(current: Candidate = current, rotation: Hashable = rotation) -> Evaluation:
            earlier = evaluations.get(rotation)
            if earlier is None:
                return fitness.measure(current, against=best_so_far)  # noqa: B023 (called at once)
            return replace(earlier, tokens=0, seconds=0.0)

        evaluation = journal.get_or_measure(search_key(number), current, measure, budget=budget)
        evaluations.setdefault(rotation, evaluation)
        if evaluation.tokens:
            measured_count += 1
            measured_seconds += evaluation.seconds
            longest = max(longest, evaluation.seconds)
        if number == 0:
            reference = evaluation.fitness
        if evaluation.complete and (best is None or evaluation.fitness < best[1].fitness):
            best = (current, evaluation)
        history.append(
            {
                "number": number,
                **(candidate_to_dict(current) or {}),
                "fitness": evaluation.fitness,
                "complete": evaluation.complete,
                "best": best[1].fitness if best else math.inf,
                "seconds": evaluation.seconds,
                **({"error": evaluation.error} if evaluation.error else {}),
            }
        )
        progress.update(history, reference, _per_minute(measured_count, measured_seconds))
        candidate = None
        ends_at = journal.processes.broadcast(measured_seconds + longest)
        if number < budget and ends_at <= seconds:
            feedback = evaluation.fitness if number else None
            candidate = journal.processes.run_on_main(lambda: next_candidate(proposals, feedback))  # noqa: B023
    if best is None:
        raise ValueError(
            f"none of {len(history)} candidates could be measured; the first one: "
            f"{history[0].get('error')}"
        )
    return best[0], history, _per_minute(measured_count, measured_seconds)


def search_key(number: int) -> str:
    """Return the journal's key of an evaluation."""
    return f"search/{number}"


def next_candidate(proposals: Proposals, fitness: float | None) -> Candidate | None:
    """Tell a strategy the last fitness and return its next candidate, or None if it has ended.

    Args:
        proposals: The strategy.
        fitness: Of the candidate before; None before the first one.
    """
    try:
        return next(proposals) if fitness is None else proposals.send(fitness)
    except StopIteration:
        return None


def _rotation_key(fitness: Fitness, candidate: Candidate) -> Hashable:
    """Return the rotation's key; method and options if they give no rotation."""
    try:
        return candidate.rotation_key(fitness.space, _KEY_DIGITS)
    except (ValueError, TypeError):
        return json.dumps([candidate.method, candidate.options], sort_keys=True)


def _per_minute(count: float, seconds: float) -> float:
    return 60 * count / seconds if seconds else 0.0


logger = logging.getLogger("rope_patch")

_PLOT_TIME_SHARE = 0.05  # at most this share of the time goes into pictures


class Progress(Protocol):
    """What a search loop updates after each evaluation."""

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        """Show the state after an evaluation; see `SearchProgress.update`."""


class SearchProgress:
    """Shows evaluations, the best fitness so far, YaRN's, and the rate.

    Args:
        space: The space that is searched.
        budget: Evaluations at most.
        title: The picture's title.
        picture: An .svg or .png file that is redrawn while the search runs; None draws none.
        progress: Whether to show a bar on stderr.

    Raises:
        ValueError: Another kind of picture, or matplotlib is not installed.
    """

    def __init__(
        self,
        space: SearchSpace,
        budget: int,
        *,
        title: str = "",
        picture: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        if picture is not None:
            from rope_patch.utils.figures import require_plot_path

            require_plot_path(picture)
        self._space, self._title, self._picture = space, title, picture
        self._bar = progress_bar(
            total=budget, desc="searching", unit="evaluation", disable=not progress
        )
        self._next_plot_time = 0.0

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        """Show the state after an evaluation.

        Args:
            history: All evaluations so far, as in `SearchResult.history`.
            reference: YaRN's fitness, nats.
            rate: Evaluations per minute.
        """
        best = history[-1]["best"]
        self._bar.set_postfix_str(f"best {best:.4f}, yarn {reference:.4f}, {rate:.3g}/min", False)
        self._bar.update(history[-1]["number"] - self._bar.n)
        if time.monotonic() >= self._next_plot_time:
            self.draw(history)

    def draw(self, history: list[dict[str, Any]]) -> None:
        """Draw the picture; if it cannot be written, warn and go on."""
        if self._picture is None or not history:
            return
        from rope_patch.searching.plot import draw_search

        started = time.monotonic()
        try:
            draw_search(self._picture, self._space, history, title=self._title)
        except (OSError, ValueError) as error:
            logger.warning("the picture of the search could not be drawn: %s", error)
        ended = time.monotonic()
        self._next_plot_time = ended + (ended - started) / _PLOT_TIME_SHARE

    def close(self) -> None:
        """End the bar."""
        self._bar.close()
