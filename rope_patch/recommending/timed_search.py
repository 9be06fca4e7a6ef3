"""The search of a recommendation, which ends after a given time."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rope_patch.recommending.bench import Bench
from rope_patch.recommending.budget import MIN_EVALUATIONS, BudgetPlan, TimeBudget
from rope_patch.recommending.sample_sets import SEARCH
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.journal import SearchJournal
from rope_patch.searching.loop import next_candidate, search_key, search_loop
from rope_patch.searching.strategies.base import Proposals
from rope_patch.searching.strategies.registry import STRATEGIES

FIRST_STRATEGY, SECOND_STRATEGY = "yarn-rcd", "curve"
MAX_CANDIDATES = 200  # of each strategy
_PLAN_KEY = "plan/search"


@dataclass(frozen=True)
class TimedResult:
    """The result of a timed search.

    Attributes:
        strategy: The strategy that proposed the best candidate.
        candidate: The best candidate.
        history: As in `SearchResult.history`.
        evaluations_per_minute: The rate of the search.
    """

    strategy: str
    candidate: Candidate
    history: list[dict[str, Any]]
    evaluations_per_minute: float


class _SearchStatus:
    """Counts the time of each evaluation, and shows the search's progress on the budget's bar."""

    def __init__(self, bench: Bench, clock: TimeBudget) -> None:
        self._bench, self._clock = bench, clock

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        best = history[-1]["best"]
        self._bench.count(search_key(len(history) - 1), history[-1]["seconds"])
        self._clock.set_status(f"search, {len(history)}: best {best:.4f}, yarn {reference:.4f}")


def search_within(
    bench: Bench,
    clock: TimeBudget,
    journal: SearchJournal,
    seed: int,
    plan: BudgetPlan,
    reserve: float,
) -> tuple[TimedResult | None, str]:
    """Search for the planned time, resuming where an earlier run ended.

    The search over YaRN's critical dimension comes first, then the curve if optuna is installed.

    Args:
        bench: Has the samples.
        clock: The time budget.
        journal: Stored measurements.
        seed: The strategies' seed.
        plan: The time and the blocks of the search.
        reserve: Seconds that must be left.

    Returns:
        The result or None, and the reason if there is none.
    """
    stored_plan = journal.get(_PLAN_KEY)
    if stored_plan is None:
        if not plan.search_seconds:
            return None, f"the budget left no time for its {MIN_EVALUATIONS} evaluations"
        stored_plan = {"blocks": plan.search_blocks}
        journal.put(_PLAN_KEY, stored_plan)
    fitness = bench.fitness(SEARCH, range(stored_plan["blocks"]))
    deadline = (
        max(clock.left() - plan.search_seconds, reserve) if plan.search_seconds else clock.left()
    )
    proposed_by: list[str] = []
    proposals = _stop_at(
        _strategy_sequence(fitness.space, seed, proposed_by),
        clock,
        _stored_count(journal),
        deadline,
    )
    best, history, evaluations_per_minute = search_loop(
        fitness, proposals, 2 * MAX_CANDIDATES, journal, _SearchStatus(bench, clock)
    )
    proposed_by = journal.processes.run_on_main(lambda: proposed_by)
    best_fitness = history[-1]["best"]
    number = next(e["number"] for e in history if e["complete"] and e["fitness"] == best_fitness)
    return TimedResult(
        proposed_by[number - 1] if number else FIRST_STRATEGY, best, history, evaluations_per_minute
    ), ""


def _stored_count(journal: SearchJournal) -> int:
    """Return how many evaluations earlier runs have stored, including YaRN's."""
    number = 0
    while journal.get(search_key(number)) is not None:
        number += 1
    return number


def _strategy_sequence(space: SearchSpace, seed: int, proposed_by: list[str]) -> Proposals:
    """Propose by one strategy after the other, and append the name of each proposal's strategy."""
    for name in (FIRST_STRATEGY, SECOND_STRATEGY) if find_spec("optuna") else (FIRST_STRATEGY,):
        proposals = STRATEGIES[name].propose(space, MAX_CANDIDATES, seed)
        candidate = next(proposals, None)
        while candidate is not None:
            proposed_by.append(name)
            fitness = yield candidate
            candidate = next_candidate(proposals, fitness)


def _stop_at(proposals: Proposals, clock: TimeBudget, stored: int, reserve: float) -> Proposals:
    """Stop proposing when `reserve` seconds remain, after replaying stored evaluations.

    Args:
        proposals: The strategy; only the main process asks it.
        clock: The time budget, by this process's own clock.
        stored: Evaluations of an earlier run, including YaRN's.
        reserve: Seconds that must be left.
    """
    number = 1
    candidate = next(proposals, None)
    while candidate is not None:
        fitness = yield candidate
        number += 1
        if number >= stored and clock.left_in_process() <= reserve:
            return
        candidate = next_candidate(proposals, fitness)
