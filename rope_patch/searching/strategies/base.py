"""What every strategy shares: how it is asked, its known starts, and never the same twice."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

from rope_patch.searching.candidates import Candidate, SearchSpace

# Yields a candidate and is sent its fitness: nats, smaller is better; infinite where it failed.
Proposals = Generator[Candidate, float, None]

MIN_CRITICAL_PAIRS = 8  # critical pairs that are tried; fewer than twice as many are
LOWEST_CRITICAL_RATIO = (
    0.6  # of the theoretical critical pair: published real ones lie at 0.81 and 0.86 of it
)


def rotation_key(space: SearchSpace, candidate: Candidate) -> tuple[object, ...]:
    """What a model could tell candidates apart by.

    Stretches and the attention factor count as equal where six digits are: formulas that mean the
    same differ by rounding.
    """
    numbers = [*candidate.stretch(space), candidate.attention_factor(space)]
    return (*(f"{number:.6g}" for number in numbers), candidate.options.get("start_tokens", 0))


class SeenRotations:
    """The rotations that a search has proposed.

    Raises:
        ValueError: There is nothing to search.
    """

    def __init__(self, space: SearchSpace) -> None:
        if space.pairs < 2:
            raise ValueError(
                f"a search needs at least two rotated pairs, got {space.pairs}: with one there is "
                "nothing to spread a stretch over"
            )
        self._space = space
        self._keys: set[tuple[object, ...]] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add_if_new(self, candidate: Candidate) -> bool:
        """Whether it is the first of its rotation; from then on it no longer is."""
        key = rotation_key(self._space, candidate)
        if key in self._keys:
            return False
        self._keys.add(key)
        return True


def critical_pair(space: SearchSpace) -> int:
    """The first pair that made no whole turn in training, the theoretical critical one.

    LongRoPE2 (arXiv:2502.20082) writes it ceil(R / 2 * log(trained_length / 2 pi) / log(theta)):
    31 for a Phi-3-mini trained on 2,048 tokens, 35 for Llama-3-8B. It is kept between the second
    and the last pair, since the first cannot be stretched by a larger base.
    """
    return max(1, min(math.ceil(space.geometry.pair_with_rotations(1.0)), space.pairs - 1))


def critical_pairs(space: SearchSpace) -> list[float]:
    """About ten critical pairs from the theoretical one down to 0.6 of it.

    They lie a power of two apart, on whole pairs where there are enough of those and between them
    where heads are small. The first is the theoretical one; the rest come ever finer, so that a
    budget too small for all of them still spans the range.
    """
    top = critical_pair(space)
    span = (1 - LOWEST_CRITICAL_RATIO) * top
    step = 2.0 ** math.floor(math.log2(span / (MIN_CRITICAL_PAIRS - 1)))
    grid = [top - step * number for number in range(int(span / step) + 1)]
    return [grid[number] for number in _coarse_to_fine(len(grid))]


def longrope_candidate(
    origin: str,
    stretch: Sequence[float],
    attention_factor: float | None = None,
    start_tokens: int = 0,
) -> Candidate:
    """A candidate of given stretches; its attention factor follows LongRoPE's law unless given."""
    options: dict[str, object] = {"long_factor": [float(number) for number in stretch]}
    if attention_factor is not None:
        options["attention_factor"] = float(attention_factor)
    if start_tokens:
        options["start_tokens"] = int(start_tokens)
    return Candidate(origin, "longrope", options)


def _coarse_to_fine(count: int) -> Iterator[int]:
    """0 to `count` - 1: the first, the last, and then halfway between, over and over."""
    given: set[int] = set()
    step = max(count - 1, 1)
    while len(given) < count:
        for number in [*range(0, count, step), count - 1]:
            if number not in given:
                given.add(number)
                yield number
        step = max(1, step // 2)
