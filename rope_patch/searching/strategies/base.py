"""The parts that all strategies share: critical dimensions, and no rotation proposed twice."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

from rope_patch.searching.candidates import Candidate, SearchSpace

# Yields a candidate and is sent its fitness: nats, smaller is better, infinite if it failed.
Proposals = Generator[Candidate, float, None]

MIN_CRITICAL_DIMENSIONS = 8  # a scan tries from 8 to 15
# Share of the theoretical critical dimension. Published real ones lie at 0.81 and 0.86 of it.
LOWEST_CRITICAL_RATIO = 0.6
KEY_DIGITS = 6


class SeenRotations:
    """The rotations that a search has proposed.

    Args:
        space: The space that is searched.

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
        """Return whether a candidate's rotation is new, and remember it."""
        key = candidate.rotation_key(self._space, KEY_DIGITS)
        if key in self._keys:
            return False
        self._keys.add(key)
        return True


def critical_dimension(space: SearchSpace) -> int:
    """Return the theoretical critical dimension: the first pair without a full training rotation.

    LongRoPE2 (arXiv:2502.20082) writes it ceil(R / 2 * log(trained_length / 2 pi) / log(theta)):
    31 for a Phi-3-mini trained on 2,048 tokens, 35 for Llama-3-8B. The result is clamped to the
    second and the last pair, since a larger base cannot stretch the first.
    """
    return max(1, min(math.ceil(space.geometry.pair_with_rotations(1.0)), space.pairs - 1))


def critical_dimensions(space: SearchSpace) -> list[float]:
    """Return about ten critical dimensions from the theoretical one down to 0.6 of it.

    The step is a power of two: whole pairs in large heads, fractions of a pair in small ones. The
    theoretical one comes first and the rest coarse to fine, so that a budget too small for all of
    them still spans the range.
    """
    top = critical_dimension(space)
    span = (1 - LOWEST_CRITICAL_RATIO) * top
    step = 2.0 ** math.floor(math.log2(span / (MIN_CRITICAL_DIMENSIONS - 1)))
    grid = [top - step * number for number in range(int(span / step) + 1)]
    return [grid[number] for number in _coarse_to_fine(len(grid))]


def longrope_candidate(
    origin: str,
    stretch: Sequence[float],
    attention_factor: float | None = None,
    start_tokens: int = 0,
) -> Candidate:
    """Return a candidate of given stretches.

    Args:
        origin: See `Candidate.origin`.
        stretch: Old / new frequency of each pair, `[R / 2]`.
        attention_factor: The multiplier of cos and sin; LongRoPE's law unless given.
        start_tokens: Tokens at the start that keep their rotation.
    """
    options: dict[str, object] = {"long_factor": [float(number) for number in stretch]}
    if attention_factor is not None:
        options["attention_factor"] = float(attention_factor)
    if start_tokens:
        options["start_tokens"] = int(start_tokens)
    return Candidate(origin, "longrope", options)


def _coarse_to_fine(count: int) -> Iterator[int]:
    """Yield 0 to `count` - 1: the first, the last, then halfway between, again and again."""
    seen: set[int] = set()
    step = max(count - 1, 1)
    while len(seen) < count:
        for number in [*range(0, count, step), count - 1]:
            if number not in seen:
                seen.add(number)
                yield number
        step = max(1, step // 2)
