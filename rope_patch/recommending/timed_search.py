"""The search of a recommendation: one that ends with the time it is given."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rope_patch.recommending.bench import Bench, Clock
from rope_patch.recommending.budget import SCAN, Plan
from rope_patch.recommending.sample_sets import SEARCH
from rope_patch.searching.candidates import Candidate, Space
from rope_patch.searching.journal import Kept
from rope_patch.searching.loop import run
from rope_patch.searching.strategies.base import Proposals
from rope_patch.searching.strategies.registry import STRATEGIES

FIRST, THEN = "yarn-rcd", "curve"
MOST = 200  # candidates of a strategy
_PLAN = "plan/search"


@dataclass(frozen=True)
class Looked:
    """What a search found.

    Attributes:
        strategy: Which one found it.
        candidate: The best.
        history: As in `SearchResult.history`.
        rate: Evaluations per minute.
    """

    strategy: str
    candidate: Candidate
    history: list[dict[str, Any]]
    rate: float


class _Watch:
    """Tells the clock how the search goes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def tell(self, history: list[dict[str, Any]], reference: float, rate: float) -> None:
        best = history[-1]["best"]
        self._clock.show(f"search, {len(history)}: best {best:.4f}, yarn {reference:.4f}")


def look(
    bench: Bench, clock: Clock, kept: Kept, seed: int, plan: Plan, reserve: float
) -> tuple[Looked | None, str]:
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
    known = kept.get(_PLAN)
    if known is None:
        if not plan.search:
            return None, f"the budget left no time for its {SCAN} evaluations"
        known = {"blocks": plan.blocks}
        kept.put(_PLAN, known)
    on = bench.fitness(SEARCH, range(known["blocks"]))
    until = max(clock.left() - plan.search, reserve) if plan.search else clock.left()
    by: list[str] = []
    proposals = _until(_chained(on.space, seed, by), clock, bench.searched, until)
    best, history, rate = run(on, proposals, 2 * MOST, kept, _Watch(clock))  # type: ignore[arg-type]
    bench.searched = len(history)
    bench.keep_clock()
    by = kept.processes.together(lambda: by)
    final = history[-1]["best"]
    number = next(e["number"] for e in history if e["complete"] and e["fitness"] == final)
    return Looked(by[number - 1] if number else FIRST, best, history, rate), ""


def _chained(space: Space, seed: int, by: list[str]) -> Proposals:
    """One strategy after the other; notes who proposes what."""
    for name in (FIRST, THEN) if find_spec("optuna") else (FIRST,):
        proposals = STRATEGIES[name].propose(space, MOST, seed)
        candidate = next(proposals, None)
        while candidate is not None:
            by.append(name)
            fitness = yield candidate
            candidate = _next(proposals, fitness)


def _until(proposals: Proposals, clock: Clock, done: int, until: float) -> Proposals:
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
        if number >= done and clock.here() <= until:
            return
        candidate = _next(proposals, fitness)


def _next(proposals: Proposals, fitness: float) -> Candidate | None:
    try:
        return proposals.send(fitness)
    except StopIteration:
        return None
