"""LongRoPE's search (Ding et al. 2024, arXiv:2402.13753): stretches of all pairs, start tokens.

Stretches do not decrease from pair to pair and lie between 1 and 1.25 times the factor; the first
n tokens keep their original rotation, n from the paper's list. The attention factor follows
LongRoPE's law and is not searched. Evolution starts from position interpolation, NTK, YaRN, and
mutations of these.
"""

from __future__ import annotations

import itertools
import math
import random

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import Proposals, SeenRotations, longrope_candidate
from rope_patch.searching.strategies.evolution import (
    PROBABILITY,
    GenomeOperators,
    evolve,
    is_monotone,
    resample,
)

# Published for Llama-2, trained on 4,096 tokens; for other models up to 1/16 of the length, too.
START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
MAX_START_SHARE = 1 / 16
MAX_STRETCH_RATIO = 1.25  # the largest stretch / factor

Genome = tuple[list[float], int]  # stretches and start tokens


class FactorOperators(GenomeOperators[Genome]):
    """The operators on monotone stretches with start tokens."""

    def __init__(self, space: SearchSpace, start_tokens: bool) -> None:
        self._space = space
        limit = MAX_START_SHARE * space.geometry.trained_length if start_tokens else 0
        self._start_token_choices = [number for number in START_TOKENS if number <= limit]

    def initial_population(self, count: int) -> list[Genome]:
        candidates = [Candidate(name, name) for name in ("linear", "ntk", "yarn")[:count]]
        return [(_cumulative_max(candidate.stretch(self._space)), 0) for candidate in candidates]

    def mutate(self, genome: Genome, rng: random.Random) -> Genome:
        stretch, start = genome
        if len(self._start_token_choices) > 1 and rng.random() < PROBABILITY:
            start = rng.choice(self._start_token_choices)
        return resample(stretch, 1.0, MAX_STRETCH_RATIO * self._space.factor, rng), start

    def crossover(self, first: Genome, second: Genome, rng: random.Random) -> Genome | None:
        stretch = [
            second_stretch if rng.random() < PROBABILITY else first_stretch
            for first_stretch, second_stretch in zip(first[0], second[0], strict=True)
        ]
        start = second[1] if rng.random() < PROBABILITY else first[1]
        return (stretch, start) if is_monotone(stretch) else None

    def to_candidate(self, origin: str, genome: Genome) -> Candidate:
        return longrope_candidate(origin, genome[0], start_tokens=genome[1])


def _cumulative_max(stretch: list[float]) -> list[float]:
    """Return the cumulative maximum; pairs of frequency 0, whose stretch is NaN, count as 1."""
    numbers = [1.0 if math.isnan(number) else number for number in stretch]
    return list(itertools.accumulate(numbers, max))


def propose(space: SearchSpace, budget: int, seed: int, *, start_tokens: bool = True) -> Proposals:
    """Propose candidates by LongRoPE's evolutionary search.

    Args:
        space: The space that is searched.
        budget: Evaluations.
        seed: The seed of all draws.
        start_tokens: Whether to search the number of start tokens too, as published. No engine's
            config can express start tokens.
    """
    return evolve(FactorOperators(space, start_tokens), SeenRotations(space), budget, seed)
