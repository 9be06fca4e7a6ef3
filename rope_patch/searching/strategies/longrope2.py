"""LongRoPE2's search (Shang et al. 2025, arXiv:2502.20082): critical dimension and stretches.

Pairs from the critical dimension on are stretched by one to two times the factor, and no pair less
than the one before it. Earlier pairs are stretched as by a larger base (NTK), the one that gives
the critical dimension its stretch. The attention factor follows LongRoPE's law and is not searched,
as in the authors' code. Evolution starts from critical dimensions between the theoretical one and
0.6 of it, with all pairs from there on stretched by the factor, and from mutations of these.
"""

from __future__ import annotations

import math
import random

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import (
    LOWEST_CRITICAL_RATIO,
    Proposals,
    SeenRotations,
    critical_dimension,
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

Genome = tuple[int, list[float]]  # the critical dimension, and stretches of all pairs from it on


class CriticalDimensionOperators(GenomeOperators[Genome]):
    """The operators on a critical dimension and the stretches from it on."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        top = critical_dimension(space)
        self._critical_dimensions = range(max(1, math.floor(LOWEST_CRITICAL_RATIO * top)), top + 1)

    def initial_population(self, count: int) -> list[Genome]:
        # At most half of the population: the other half are mutations of these.
        seed_count = min(len(self._critical_dimensions), max(1, count // 2))
        offsets = [
            round(n * (len(self._critical_dimensions) - 1) / max(seed_count - 1, 1))
            for n in range(seed_count)
        ]
        pairs = [self._critical_dimensions[-1 - number] for number in offsets]
        return [(pair, [self._space.factor] * (self._space.pairs - pair)) for pair in pairs]

    def mutate(self, genome: Genome, rng: random.Random) -> Genome:
        dimension, _ = genome
        if rng.random() < PROBABILITY:
            dimension = rng.choice(self._critical_dimensions)
        low = self._space.factor
        stretch = resample(_expand(genome), low, MAX_STRETCH_RATIO * low, rng, start=dimension)
        return dimension, stretch[dimension:]

    def crossover(self, first: Genome, second: Genome, rng: random.Random) -> Genome | None:
        dimension = second[0] if rng.random() < PROBABILITY else first[0]
        one, two = _expand(first)[dimension:], _expand(second)[dimension:]
        stretch = [b if rng.random() < PROBABILITY else a for a, b in zip(one, two, strict=True)]
        return (dimension, stretch) if is_monotone(stretch) else None

    def to_candidate(self, origin: str, genome: Genome) -> Candidate:
        dimension, stretch = genome
        base = [stretch[0] ** (pair / dimension) for pair in range(dimension)]
        return longrope_candidate(origin, base + stretch)


def _expand(genome: Genome) -> list[float]:
    """Return stretches of all pairs, where those before the critical dimension equal its own."""
    dimension, stretch = genome
    return [stretch[max(pair - dimension, 0)] for pair in range(dimension + len(stretch))]


def propose(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """Propose candidates by LongRoPE2's evolutionary search.

    Args:
        space: The space that is searched.
        budget: Evaluations.
        seed: The seed of all draws.
    """
    return evolve(CriticalDimensionOperators(space), SeenRotations(space), budget, seed)
