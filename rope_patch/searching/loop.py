"""The search itself: ask, measure, keep, tell, until the budget is spent."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from rope_patch.searching.candidates import Candidate
from rope_patch.searching.journal import SharedJournal, candidate_to_dict
from rope_patch.searching.measure.fitness import Evaluation, Fitness
from rope_patch.searching.progress import SearchProgress
from rope_patch.searching.strategies.base import Proposals


def search_loop(
    on: Fitness, proposals: Proposals, budget: int, kept: SharedJournal, watch: SearchProgress
) -> tuple[Candidate, list[dict[str, Any]], float]:
    """Searches.

    YaRN comes first, under number 0: what is found is never worse than it on these samples, and
    candidates without hope are known from the start. A rotation that was measured is not measured
    again.

    Args:
        on: Measures candidates.
        proposals: Asked by the main process alone.
        budget: Candidates at most.
        kept: Remembers measurements; what it knows already is not measured again.
        watch: Is told after each.

    Returns:
        The best candidate, the history as in `SearchResult.history`, and evaluations per minute.

    Raises:
        ValueError: Not one candidate could be measured.
    """
    history: list[dict[str, Any]] = []
    best: tuple[Candidate, Evaluation] | None = None
    seen: dict[str, Evaluation] = {}
    spent = [0, 0.0]  # evaluations that were measured, and seconds
    candidate: Candidate | None = Candidate("yarn", "yarn")
    reference = math.nan
    while candidate is not None:
        number, rotation, chosen = len(history), _rotation_key(on, candidate), candidate
        against = best[1] if best else None

        def measure(chosen: Candidate = chosen, rotation: str = rotation) -> Evaluation:
            known = seen.get(rotation)
            if known is None:
                return on.measure(chosen, against=against)  # noqa: B023 (called at once)
            return replace(known, tokens=0, seconds=0.0)

        found = kept.get_or_measure(f"search/{number}", chosen, measure, budget=budget)
        seen.setdefault(rotation, found)
        if found.tokens:
            spent = [spent[0] + 1, spent[1] + found.seconds]
        if number == 0:
            reference = found.fitness
        if found.complete and (best is None or found.fitness < best[1].fitness):
            best = (chosen, found)
        history.append(
            {
                "number": number,
                **(candidate_to_dict(chosen) or {}),
                "fitness": found.fitness,
                "complete": found.complete,
                "best": best[1].fitness if best else math.inf,
                "seconds": found.seconds,
                **({"error": found.error} if found.error else {}),
            }
        )
        watch.update(history, reference, _per_minute(*spent))
        candidate = None
        if number < budget:
            fitness = found.fitness if number else None
            candidate = kept.processes.run_on_main(lambda: _next_candidate(proposals, fitness))  # noqa: B023
    if best is None:
        raise ValueError(
            f"none of {len(history)} candidates could be measured; the first one: "
            f"{history[0].get('error')}"
        )
    return best[0], history, _per_minute(*spent)


def _next_candidate(proposals: Proposals, fitness: float | None) -> Candidate | None:
    """The next candidate, given the last one's fitness; None where there is nothing more to try."""
    try:
        return next(proposals) if fitness is None else proposals.send(fitness)
    except StopIteration:
        return None


def _rotation_key(on: Fitness, candidate: Candidate) -> str:
    """Tells rotations apart; candidates that have none by what they ask for."""
    try:
        found: Any = [
            [f"{number:.9g}" for number in candidate.stretch(on.space)],
            f"{candidate.attention_factor(on.space):.9g}",
            candidate.options.get("start_tokens", 0),
        ]
    except (ValueError, TypeError):
        found = [candidate.method, candidate.options]
    return json.dumps(found, sort_keys=True)


def _per_minute(count: float, seconds: float) -> float:
    return 60 * count / seconds if seconds else 0.0
