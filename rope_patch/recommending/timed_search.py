"""The search of a recommendation: one that ends with the time it is given."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rope_patch.recommending.bench import Bench, TimeBudget
from rope_patch.recommending.budget import MIN_EVALUATIONS, BudgetPlan
from rope_patch.recommending.sample_sets import SEARCH
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.journal import SharedJournal
from rope_patch.searching.loop import search_loop
from rope_patch.searching.strategies.base import Proposals
from rope_patch.searching.strategies.registry import STRATEGIES

FIRST_STRATEGY, SECOND_STRATEGY = "yarn-rcd", "curve"
MAX_CANDIDATES = 200  # candidates of a strategy
_PLAN_KEY = "plan/search"


@dataclass(frozen=True)
class TimedResult:
    """What a search found.

    Attributes:
        strategy: Which one found it.
        candidate: The best.
        history: As in `SearchResult.history`.
        evaluations_per_minute: Evaluations per minute.
    """

    strategy: str
    candidate: Candidate
    history: list[dict[str, Any]]
    evaluations_per_minute: float


class _SearchStatus:
    """Tells the clock how the search goes."""

    def __init__(self, clock: TimeBudget) -> None:
        self._clock = clock

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        best = history[-1]["best"]
        self._clock.set_status(f"search, {len(history)}: best {best:.4f}, yarn {reference:.4f}")


def search_within(
    bench: Bench,
    clock: TimeBudget,
    kept: SharedJournal,
    seed: int,
    plan: BudgetPlan,
    reserve: float,
) -> tuple[TimedResult | None, str]:
    """Searches for as long as was planned, and goes on where an earlier run ended.

    The critical pairs of YaRN come first, the curve then, where optuna is installed.

    Args:
        bench: Has the samples.
        clock: The budget.
        kept: Measurements so far.
        seed: Of proposals.
        plan: How long.
        reserve: Seconds that must be left.

    Returns:
        What was found, or None and why there is nothing.
    """
    known = kept.get(_PLAN_KEY)
    if known is None:
        if not plan.search_seconds:
            return None, f"the budget left no time for its {MIN_EVALUATIONS} evaluations"
        known = {"blocks": plan.search_blocks}
        kept.put(_PLAN_KEY, known)
    on = bench.fitness(SEARCH, range(known["blocks"]))
    until = (
        max(clock.left() - plan.search_seconds, reserve) if plan.search_seconds else clock.left()
    )
    by: list[str] = []
    proposals = _stop_at(
        _strategy_sequence(on.space, seed, by), clock, bench.candidates_searched, until
    )
    best, history, rate = search_loop(on, proposals, 2 * MAX_CANDIDATES, kept, _SearchStatus(clock))  # type: ignore[arg-type]
    bench.candidates_searched = len(history)
    bench.save_clock()
    by = kept.processes.run_on_main(lambda: by)
    final = history[-1]["best"]
    number = next(e["number"] for e in history if e["complete"] and e["fitness"] == final)
    return TimedResult(by[number - 1] if number else FIRST_STRATEGY, best, history, rate), ""


def _strategy_sequence(space: SearchSpace, seed: int, by: list[str]) -> Proposals:
    """One strategy after the other; notes who proposes what."""
    for name in (FIRST_STRATEGY, SECOND_STRATEGY) if find_spec("optuna") else (FIRST_STRATEGY,):
        proposals = STRATEGIES[name].propose(space, MAX_CANDIDATES, seed)
        candidate = next(proposals, None)
        while candidate is not None:
            by.append(name)
            fitness = yield candidate
            candidate = _next_candidate(proposals, fitness)


def _stop_at(proposals: Proposals, clock: TimeBudget, done: int, until: float) -> Proposals:
    """Ends when so many seconds are left, but not before all that was measured already.

    Args:
        proposals: Asked by the main process alone.
        clock: Its own time counts here.
        done: Evaluations that an earlier run kept, YaRN with them.
        until: Seconds.
    """
    number = 1
    candidate = next(proposals, None)
    while candidate is not None:
        fitness = yield candidate
        number += 1
        if number >= done and clock.left_in_process() <= until:
            return
        candidate = _next_candidate(proposals, fitness)


def _next_candidate(proposals: Proposals, fitness: float) -> Candidate | None:
    try:
        return proposals.send(fitness)
    except StopIteration:
        return None
