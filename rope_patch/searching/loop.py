"""The search loop: ask for a candidate, measure it, store the result, tell the strategy."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from rope_patch.searching.candidates import Candidate
from rope_patch.searching.journal import SearchJournal, candidate_to_dict
from rope_patch.searching.measure.fitness import Evaluation, Fitness
from rope_patch.searching.progress import Progress
from rope_patch.searching.strategies.base import Proposals

_KEY_DIGITS = 9  # finer than the strategies' key, so that every proposal is measured


def search_loop(
    fitness: Fitness,
    proposals: Proposals,
    budget: int,
    journal: SearchJournal,
    progress: Progress,
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

    Returns:
        The best candidate, the history as in `SearchResult.history`, and evaluations per minute.

    Raises:
        ValueError: Not one candidate could be measured.
    """
    history: list[dict[str, Any]] = []
    best: tuple[Candidate, Evaluation] | None = None
    evaluations: dict[Hashable, Evaluation] = {}
    measured_count, measured_seconds = 0, 0.0
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
        if number < budget:
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
