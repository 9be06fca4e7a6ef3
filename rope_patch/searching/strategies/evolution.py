"""The evolutionary search of both LongRoPE papers; their genomes are in files of their own.

Published (arXiv:2402.13753, table 9 and the authors' default settings): a population of 64, then 40
rounds in which the 32 best are parents of 16 mutations and 16 crossovers, 1,344 evaluations in
all. A mutation redraws each number with probability 0.3. A crossover takes each number from the
second parent with probability 0.3, and becomes a mutation after 20 attempts without a valid child.

The sizes scale with the budget as with the authors' setting evo_scale: one number multiplies
population, rounds, parents, mutations and crossovers so that the budget is spent. Evaluations that
rounding leaves over go into further rounds.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from rope_patch.searching.candidates import Candidate
from rope_patch.searching.strategies.base import Proposals, SeenRotations

POPULATION, ROUNDS, PARENTS, CHILDREN = 64, 40, 32, 32  # children: half mutations, half crossovers
PROBABILITY = 0.3
STEP = 0.01  # the grid of stretches
MAX_CROSSOVER_ATTEMPTS = 20
MAX_MUTATION_ATTEMPTS = 1000  # known rotations in a row that end the search

G = TypeVar("G")  # the genome: a tuple of numbers


@dataclass(frozen=True)
class PopulationSizes:
    """The sizes of an evolution's population and generations."""

    population: int
    parents: int
    mutations: int
    crossovers: int

    @classmethod
    def for_budget(cls, budget: int) -> PopulationSizes:
        """Return the published sizes, scaled by at most 1 so that they spend the budget."""
        rounds = ROUNDS * CHILDREN
        scale = (math.sqrt(POPULATION**2 + 4 * rounds * budget) - POPULATION) / (2 * rounds)
        scale = min(scale, 1.0)
        half = max(1, round(scale * CHILDREN / 2))
        population = max(4, round(scale * POPULATION))
        return cls(population, max(2, round(scale * PARENTS)), half, half)


class GenomeOperators(ABC, Generic[G]):
    """The operators of an evolution on one kind of genome."""

    @abstractmethod
    def initial_population(self, count: int) -> list[G]:
        """Return at most `count` genomes to start from, the most promising first."""

    @abstractmethod
    def mutate(self, genome: G, rng: random.Random) -> G:
        """Return a valid neighbour, possibly the genome itself."""

    @abstractmethod
    def crossover(self, first: G, second: G, rng: random.Random) -> G | None:
        """Return a child of two genomes, or None if it is not valid."""

    @abstractmethod
    def to_candidate(self, origin: str, genome: G) -> Candidate:
        """Return the candidate of a genome."""


def evolve(operators: GenomeOperators[G], seen: SeenRotations, budget: int, seed: int) -> Proposals:
    """Propose candidates until the budget is spent or no new rotation is left.

    Args:
        operators: The genome's operators.
        seen: Rotations proposed so far.
        budget: Evaluations.
        seed: The seed of all draws.
    """
    rng = random.Random(seed)
    sizes = PopulationSizes.for_budget(budget)
    alive: list[tuple[float, G]] = []

    def attempt(origin: str, genome: G) -> Generator[Candidate, float, bool]:
        candidate = operators.to_candidate(origin, genome)
        if not seen.add_if_new(candidate):
            return False
        fitness = yield candidate
        alive.append((fitness, genome))
        return True

    def mutate(genome: G) -> Generator[Candidate, float, bool]:
        for _ in range(MAX_MUTATION_ATTEMPTS):
            genome = operators.mutate(genome, rng)
            if (yield from attempt("mutation", genome)):
                return True
        return False

    starts = operators.initial_population(min(budget, sizes.population))
    for genome in starts:
        yield from attempt("start", genome)
    for number in range(len(alive), min(budget, sizes.population)):
        if not (yield from mutate(starts[number % len(starts)])):
            return
    while len(seen) < budget:
        # Sorting is stable: of equally fit genomes, the older one stays ahead.
        parents = sorted(alive, key=lambda pair: pair[0])[: sizes.parents]
        alive[:] = parents
        for number in range(min(sizes.mutations + sizes.crossovers, budget - len(seen))):
            if number < sizes.mutations or len(parents) < 2:
                if not (yield from mutate(rng.choice(parents)[1])):
                    return
                continue
            first, second = sorted(rng.sample(range(len(parents)), 2))
            for _ in range(MAX_CROSSOVER_ATTEMPTS):
                child = operators.crossover(parents[first][1], parents[second][1], rng)
                if child is not None and (yield from attempt("crossover", child)):
                    break
            else:
                if not (yield from mutate(parents[first][1])):
                    return


def resample(
    stretch: list[float], low: float, high: float, rng: random.Random, start: int = 0
) -> list[float]:
    """Return stretches; each one from pair `start` on is redrawn with probability 0.3.

    A new stretch lies between its neighbours', so that stretches stay non-decreasing, and within
    the bounds, on a grid of 0.01.

    Args:
        stretch: Stretch of each pair.
        low: Lower bound.
        high: Upper bound.
        rng: The source of all draws.
        start: First pair that may be redrawn.
    """
    result = list(stretch)
    for pair in range(start, len(result)):
        if rng.random() >= PROBABILITY:
            continue
        below = max(low, result[pair - 1]) if pair > start else low
        above = min(high, result[pair + 1]) if pair + 1 < len(result) else high
        first, last = math.ceil(below / STEP - 1e-9), math.floor(above / STEP + 1e-9)
        if first <= last:
            result[pair] = round(rng.randint(first, last) * STEP, 2)
    return result


def is_monotone(stretch: list[float]) -> bool:
    """Return whether no pair is stretched less than the one before."""
    return all(here <= after for here, after in itertools.pairwise(stretch))
