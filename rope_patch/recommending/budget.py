"""What fits into a budget, from what a few passes took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rope_patch.recommending.bench import BLOCK_SIZE

FINALISTS = 3  # rotations that halving stops at
MIN_EVALUATIONS = 10  # evaluations that a search needs to be worth anything
_PREFERRED_EVALUATIONS = 40  # so many are worth more than more samples in each
_SEARCH_SHARE = 0.45  # of what remains, for the search
_SAFETY_MARGIN = 1.1  # passes are not all alike


@dataclass(frozen=True)
class BlockCosts:
    """Seconds that a block takes.

    Attributes:
        long: At the target length.
        within: Answers and prose within the trained length.
    """

    long: float
    within: float

    @property
    def both(self) -> float:
        """Seconds of everything for one method."""
        return self.long + self.within


@dataclass(frozen=True)
class BudgetPlan:
    """What fits.

    Attributes:
        first_rotations: Rotations that are measured on a first block.
        samples: That the best are measured on.
        evaluations: Of the search, about; 0 if there is none.
        search_seconds: Seconds for it.
        search_blocks: That it scores each candidate on.
    """

    first_rotations: int
    samples: int
    evaluations: int = 0
    search_seconds: float = 0.0
    search_blocks: int = 0


def minimum_seconds(costs: BlockCosts, short: float, done: int = 0) -> float:
    """Seconds that the plain model and one method take, with their controls.

    Args:
        costs: Of a block.
        short: Of a block of answers within the trained length, which the gate takes once more.
        done: Methods that were measured already.
    """
    return _SAFETY_MARGIN * ((2 - done) * costs.both + costs.long + (0 if done else short))


def plan_budget(
    left: float,
    costs: BlockCosts,
    rotations: int,
    max_blocks: int,
    max_search_blocks: int,
    measured_rotations: int = 2,
) -> BudgetPlan:
    """What to do with the time that is left.

    A first block for every rotation comes first. Of what then remains, a search gets nearly half,
    if that is enough for one. The rest goes to more samples for the best half, of that again the
    best half, and so on, the samples doubling. Once there are no more samples, the search gets what
    is over.

    Args:
        left: Seconds.
        costs: Of a block.
        rotations: That are still to be measured at the length.
        max_blocks: Blocks there are.
        max_search_blocks: Blocks there are to search by; 0 where there can be no search.
        measured_rotations: Rotations that were measured.
    """
    left = left / _SAFETY_MARGIN - costs.long  # the control of the best, in the end
    first = max(0, min(rotations, int(left / costs.both)))
    left -= first * costs.both
    seconds = _SEARCH_SHARE * max(left, 0.0)
    blocks = evaluations = 0
    if max_search_blocks and seconds >= (MIN_EVALUATIONS + 1) * costs.long:
        blocks = max(
            1, min(max_search_blocks, int(seconds / (_PREFERRED_EVALUATIONS * costs.long)))
        )
        evaluations = int(seconds / (blocks * costs.long))
        left -= seconds + costs.both
    else:
        seconds = 0.0
    done, alive = 1, measured_rotations + first + bool(evaluations)
    while done < max_blocks:
        alive = halve(alive)
        new = next_block_count(left, costs, alive, done, max_blocks)
        if new <= done:
            break
        left -= (new - done) * (alive * costs.both + costs.within)
        done = new
    if evaluations and done == max_blocks:  # nobody else has a use for what is left
        seconds += left
        evaluations = int(seconds / (blocks * costs.long))
    return BudgetPlan(first, done * BLOCK_SIZE, evaluations, seconds, blocks)


def halve(alive: int) -> int:
    """How many stay in the next round."""
    return min(alive, max(FINALISTS, math.ceil(alive / 2)))


def next_block_count(left: float, costs: BlockCosts, alive: int, done: int, max_blocks: int) -> int:
    """The blocks that a next round brings everybody to: twice as many, or what fits."""
    fits = int(left / (alive * costs.both + costs.within)) if left > 0 else 0
    return min(2 * done, max_blocks, done + fits)
