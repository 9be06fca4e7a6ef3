"""LongRoPE2's search (Shang et al. 2025, arXiv:2502.20082): the critical pair and those behind it.

Pairs from the critical one on are stretched by one to two times the factor, not decreasing from
pair to pair. Pairs before it are stretched as by a larger base (NTK), the one that gives the
critical pair its stretch. The attention factor follows LongRoPE's law and is not searched, as in
the authors' code. Evolution starts from critical pairs between the theoretical one and 0.6 of it,
with all pairs from there on stretched by the factor, and from mutations of these.
"""

from __future__ import annotations

import math
import random

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import (
    LOWEST_CRITICAL_RATIO,
    Proposals,
    SeenRotations,
    critical_pair,
    longrope_candidate,
)
from rope_patch.searching.strategies.evolution import (
    PROBABILITY,
    GenomeOperators,
    evolve,
    is_monotone,
    resample,
)

MAX_STRETCH_RATIO = 2.0  # the largest stretch / factor

Genome = tuple[int, list[float]]  # the critical pair, and stretches of all pairs from it on


class CriticalPairOperators(GenomeOperators[Genome]):
    """The operators on a critical pair and the stretches from it on."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        top = critical_pair(space)
        self._critical_pairs = range(max(1, math.floor(LOWEST_CRITICAL_RATIO * top)), top + 1)

    def initial_population(self, count: int) -> list[Genome]:
        # At most half of the population: the other half are mutations of these.
        few = min(len(self._critical_pairs), max(1, count // 2))
        spread = [round(n * (len(self._critical_pairs) - 1) / max(few - 1, 1)) for n in range(few)]
        pairs = [self._critical_pairs[-1 - number] for number in spread]
        return [(pair, [self._space.factor] * (self._space.pairs - pair)) for pair in pairs]

    def mutate(self, genome: Genome, rng: random.Random) -> Genome:
        critical, _ = genome
        if rng.random() < PROBABILITY:
            critical = rng.choice(self._critical_pairs)
        low = self._space.factor
        whole = resample(_expand(genome), low, MAX_STRETCH_RATIO * low, rng, start=critical)
        return critical, whole[critical:]

    def crossover(self, first: Genome, second: Genome, rng: random.Random) -> Genome | None:
        critical = second[0] if rng.random() < PROBABILITY else first[0]
        one, two = _expand(first)[critical:], _expand(second)[critical:]
        stretch = [b if rng.random() < PROBABILITY else a for a, b in zip(one, two, strict=True)]
        return (critical, stretch) if is_monotone(stretch) else None

    def to_candidate(self, origin: str, genome: Genome) -> Candidate:
        critical, stretch = genome
        base = [stretch[0] ** (pair / critical) for pair in range(critical)]
        return longrope_candidate(origin, base + stretch)


def _expand(genome: Genome) -> list[float]:
    """Return stretches of all pairs, where those before the critical one equal its own."""
    critical, stretch = genome
    return [stretch[max(pair - critical, 0)] for pair in range(critical + len(stretch))]


def propose(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """Propose candidates by LongRoPE2's evolutionary search.

    Args:
        space: The space that is searched.
        budget: Evaluations.
        seed: The seed of all draws.
    """
    return evolve(CriticalPairOperators(space), SeenRotations(space), budget, seed)
