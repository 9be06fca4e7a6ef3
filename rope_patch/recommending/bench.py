"""Scores of rotations on blocks of samples, and the search within a time budget.

A measurement is stored in the run's journal and counts against the budget once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from rope_patch.extension import Extension
from rope_patch.inference.samples import Sample
from rope_patch.recommending.budget import BudgetPlan, TimeBudget
from rope_patch.recommending.decision_rule import Scores
from rope_patch.recommending.sample_sets import BLOCK_SIZE, SEARCH
from rope_patch.recommending.variants import VariantRotation
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.fitness import Fitness
from rope_patch.searching.journal import SearchJournal
from rope_patch.searching.loop import next_candidate, search_key, search_loop
from rope_patch.searching.pipeline import MIN_EVALUATIONS
from rope_patch.searching.strategies.base import Proposals
from rope_patch.searching.strategies.registry import STRATEGIES
from rope_patch.utils.processes import Processes

# A journal's line `budget/MINUTES` says that a run with this budget measured what follows.
BUDGET_KEY = "budget"


class MeasurementFailed(Exception):
    """A rotation could not be measured; the message says why."""


class BlockScorer:
    """Measures rotations on blocks of samples and stores the results.

    Args:
        model: The unpatched model.
        space: The rotation that is extended, and the target.
        blocks_by_kind: By kind, a function that makes a block's samples, and the number of blocks.
        extension: The request; each rotation has its own method, options and factor.
        journal: Stores the results.
        clock: Records the costs.
        processes: Processes that share the work.
        earlier: Keys of measurements that the clock counts already.

    Attributes:
        samples_scored: Samples in all, with those of earlier runs.
    """

    def __init__(
        self,
        model: Any,
        space: SearchSpace,
        blocks_by_kind: Mapping[str, tuple[Callable[[int], Sequence[Sample]], int]],
        extension: Extension,
        journal: SearchJournal,
        clock: TimeBudget,
        processes: Processes,
        earlier: Set[str] = frozenset(),
    ) -> None:
        self._model, self._space, self._sets = model, space, dict(blocks_by_kind)
        self._extension, self._journal, self._clock = extension, journal, clock
        self._processes, self._earlier = processes, earlier
        self._samples: dict[tuple[str, int], list[Sample]] = {}
        self._seen: set[str] = set()
        self.samples_scored = 0

    def block_count(self, kind: str) -> int:
        """Return how many blocks of a kind there are."""
        return self._sets[kind][1] if kind in self._sets else 0

    def drop_kind(self, kind: str) -> None:
        """Remove all blocks of a kind."""
        del self._sets[kind]

    def samples(self, kind: str, block: int) -> list[Sample]:
        """Return a block of samples, made on first use."""
        if (kind, block) not in self._samples:
            self._samples[kind, block] = list(self._sets[kind][0](block))
        return self._samples[kind, block]

    def has(self, rotation: VariantRotation, kind: str, blocks: int) -> bool:
        """Return whether the first blocks of a kind were measured."""
        return all(
            self._journal.get(_block_key(rotation, kind, n)) is not None for n in range(blocks)
        )

    def scores(self, rotation: VariantRotation, kind: str, blocks: int, name: str = "") -> Scores:
        """Return a rotation's scores on the first blocks of a kind, measured unless stored.

        Args:
            rotation: The rotation.
            kind: A kind of samples.
            blocks: How many blocks.
            name: The method's name, to show.

        Raises:
            MeasurementFailed: The rotation cannot be measured.
        """
        scores = [self._measure_block(rotation, kind, number, name) for number in range(blocks)]
        return sum(scores[1:], scores[0])

    def fitness(self, kind: str, blocks: Sequence[int], factor: float | None = None) -> Fitness:
        """Return the fitness on some blocks."""
        return Fitness(
            self._model,
            [sample for block in blocks for sample in self.samples(kind, block)],
            replace(self._extension, factor=factor or self._space.factor, length=None),
            self._processes,
        )

    def count(self, key: str, seconds: float) -> None:
        """Count the time of a measurement by its key in the journal, unless it is an earlier one's.

        A stored measurement counts as it did when it was made, so that all choices by the time left
        come out again.
        """
        self._clock.count(0.0 if key in self._earlier else seconds)

    def _measure_block(
        self, rotation: VariantRotation, kind: str, number: int, name: str
    ) -> Scores:
        key = _block_key(rotation, kind, number)
        entry = self._journal.get(key)
        if entry is None:
            self._clock.set_status(
                f"{name or rotation.key}: {kind}, {number * BLOCK_SIZE + 1} and on"
            )
            started = time.monotonic()
            fitness = self.fitness(kind, [number], rotation.factor if rotation.candidate else None)
            evaluation = fitness.measure(rotation.candidate)
            if evaluation.error is not None:
                raise MeasurementFailed(evaluation.error)
            entry = {
                "nll": list(evaluation.nll),
                "hits": [list(hits) for hits in evaluation.hits],
                "groups": fitness.groups,
                "seconds": time.monotonic() - started,
                "elapsed": self._clock.elapsed(),  # includes the time since the last measurement
            }
            self._journal.put(key, entry)
        if key not in self._seen:
            self._seen.add(key)
            self.samples_scored += len(entry["nll"])
            self._clock.record_cost(kind, entry["seconds"])
            self.count(key, _elapsed(entry))
        return Scores(
            tuple(entry["nll"]),
            tuple(tuple(hits) for hits in entry["hits"]),
            tuple(entry["groups"]),
        )


def earlier_usage(journal: SearchJournal, minutes: float) -> tuple[float, frozenset[str]]:
    """Return the seconds and the keys of measurements by runs with another budget.

    Args:
        journal: Stored measurements.
        minutes: The budget of this run, which is stored with its first measurement.
    """
    key = f"{BUDGET_KEY}/{float(minutes)!r}"
    earlier = journal.stored_before(key)
    journal.put_with_next(key, {})
    return sum(map(_elapsed, earlier.values())), frozenset(earlier)


def _elapsed(entry: dict[str, Any]) -> float:
    """Return the seconds that a stored measurement counts; 0 for what is none."""
    if "evaluation" in entry:
        return float(entry["evaluation"]["seconds"])
    # Earlier versions stored the time of the measurement alone.
    return float(entry.get("elapsed", entry.get("seconds", 0.0)))


def _block_key(rotation: VariantRotation, kind: str, number: int) -> str:
    return f"{kind}/{number}/{rotation.key}"


FIRST_STRATEGY, SECOND_STRATEGY = "yarn-rcd", "curve"
_MAX_REFUSED = 10  # candidates that engines refuse one after another, before a strategy is left
MAX_CANDIDATES = 200  # candidates of a strategy; time ends most searches before
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

    def __init__(self, scorer: BlockScorer, clock: TimeBudget) -> None:
        self._scorer, self._clock = scorer, clock

    def update(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        best = history[-1]["best"]
        self._scorer.count(search_key(len(history) - 1), history[-1]["seconds"])
        self._clock.set_status(f"search, {len(history)}: best {best:.4f}, yarn {reference:.4f}")


def search_within(
    scorer: BlockScorer,
    clock: TimeBudget,
    journal: SearchJournal,
    seed: int,
    plan: BudgetPlan,
    reserve: float,
    is_servable: Callable[[str, Candidate], bool] | None = None,
) -> tuple[TimedResult | None, str]:
    """Search for the planned time, resuming where an earlier run ended.

    The search over YaRN's critical dimension comes first, then the curve if optuna is installed.

    Args:
        scorer: Has the samples.
        clock: The time budget.
        journal: Stored measurements.
        seed: The strategies' seed.
        plan: The time and the blocks of the search.
        reserve: Seconds that must be left.
        is_servable: Whether the required engines run a strategy's candidate; None if all may come.

    Returns:
        The result or None, and the reason if there is none.
    """
    stored_plan = journal.get(_PLAN_KEY)
    if stored_plan is None:
        if not plan.search_seconds:
            return None, f"the budget left no time for its {MIN_EVALUATIONS} evaluations"
        stored_plan = {"blocks": plan.search_blocks}
        journal.put(_PLAN_KEY, stored_plan)
    fitness = scorer.fitness(SEARCH, range(stored_plan["blocks"]))
    deadline = (
        max(clock.left() - plan.search_seconds, reserve) if plan.search_seconds else clock.left()
    )
    proposed_by: list[str] = []
    proposals = _stop_at(
        _strategy_sequence(fitness.space, seed, proposed_by, is_servable),
        clock,
        _stored_count(journal),
        deadline,
    )
    best, history, evaluations_per_minute = search_loop(
        fitness, proposals, 2 * MAX_CANDIDATES, journal, _SearchStatus(scorer, clock)
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


def _strategy_sequence(
    space: SearchSpace,
    seed: int,
    proposed_by: list[str],
    is_servable: Callable[[str, Candidate], bool] | None,
) -> Proposals:
    """Propose by one strategy after the other, and append the name of each proposal's strategy."""
    for name in (FIRST_STRATEGY, SECOND_STRATEGY) if find_spec("optuna") else (FIRST_STRATEGY,):
        proposals = STRATEGIES[name].propose(space, MAX_CANDIDATES, seed)
        candidate = next(proposals, None)
        refused_in_a_row = 0
        # An engine that takes none of the first ones takes no form of this strategy.
        while candidate is not None and refused_in_a_row < _MAX_REFUSED:
            if is_servable is None or is_servable(name, candidate):
                refused_in_a_row = 0
                proposed_by.append(name)
                fitness = yield candidate
            else:
                refused_in_a_row += 1
                fitness = math.inf
            candidate = next_candidate(proposals, fitness)


def _stop_at(proposals: Proposals, clock: TimeBudget, stored: int, reserve: float) -> Proposals:
    """Stop proposing when `reserve` seconds remain, after replaying stored evaluations."""
    # `stored` evaluations of an earlier run include the one of YaRN. Only the main process asks the
    # strategy, so its own clock decides.
    number = 1
    candidate = next(proposals, None)
    while candidate is not None:
        fitness = yield candidate
        number += 1
        if number >= stored and clock.left_in_process() <= reserve:
            return
        candidate = next_candidate(proposals, fitness)
