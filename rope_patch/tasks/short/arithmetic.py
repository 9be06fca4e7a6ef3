"""Sums and differences after worked examples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rope_patch.tasks.short import choices

EXAMPLES = 8
LARGEST = 99
_MISSES = (-10, -2, -1, 1, 2, 10)  # a digit wrong, or one carried wrongly


def build(**metadata: Any) -> dict[str, Any]:
    """Build lm-eval's `custom_dataset`; its metadata is what `choices.build` takes."""
    return choices.build(questions, "rp_short_arithmetic", **metadata)


def questions(rng: random.Random) -> Iterator[choices.ChoiceQuestion]:
    """Yield questions without end; no result is negative."""
    while True:
        solved = [_problem(rng) for _ in range(EXAMPLES)]
        new_problem, result = _problem(rng)
        if new_problem in dict(solved):
            continue
        near = [result + miss for miss in _MISSES if result + miss >= 0]
        yield choices.ChoiceQuestion(
            context="".join(f"{problem} = {value}\n" for problem, value in solved)
            + f"{new_problem} =",
            right=str(result),
            wrong=[str(value) for value in rng.sample(near, 3)],
        )


def _problem(rng: random.Random) -> tuple[str, int]:
    small, large = sorted(rng.sample(range(1, LARGEST + 1), 2))
    if rng.random() < 0.5:
        return f"{large} + {small}", large + small
    return f"{large} - {small}", large - small
