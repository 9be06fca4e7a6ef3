"""What fits into a budget, from what a few passes took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rope_patch.recommending.bench import BLOCK

KEPT = 3  # rotations that halving stops at
SCAN = 10  # evaluations that a search needs to be worth anything
_SEARCHES = 40  # so many are worth more than more samples in each
_SHARE = 0.45  # of what remains, for the search
_MARGIN = 1.1  # passes are not all alike


@dataclass(frozen=True)
class Costs:
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
class Plan:
    """What fits.

    Attributes:
        first: Rotations that are measured on a first block.
        samples: That the best are measured on.
        evaluations: Of the search, about; 0 if there is none.
        search: Seconds for it.
        blocks: That it scores each candidate on.
    """

    first: int
    samples: int
    evaluations: int = 0
    search: float = 0.0
    blocks: int = 0


def least(costs: Costs, short: float, done: int = 0) -> float:
    """Seconds that the plain model and one method take, with their controls.

    Args:
        costs: Of a block.
        short: Of a block of answers within the trained length, which the gate takes once more.
        done: Methods that were measured already.
    """
    return _MARGIN * ((2 - done) * costs.both + costs.long + (0 if done else short))


def make(
    left: float, costs: Costs, rotations: int, most: int, searchable: int, known: int = 2
) -> Plan:
    """What to do with the time that is left.

    A first block for every rotation comes first. Of what then remains, a search gets nearly half,
    if that is enough for one. The rest goes to more samples for the best half, of that again the
    best half, and so on, the samples doubling. Once there are no more samples, the search gets what
    is over.

    Args:
        left: Seconds.
        costs: Of a block.
        rotations: That are still to be measured at the length.
        most: Blocks there are.
        searchable: Blocks there are to search by; 0 where there can be no search.
        known: Rotations that were measured.
    """
    left = left / _MARGIN - costs.long  # the control of the best, in the end
    first = max(0, min(rotations, int(left / costs.both)))
    left -= first * costs.both
    seconds = _SHARE * max(left, 0.0)
    blocks = evaluations = 0
    if searchable and seconds >= (SCAN + 1) * costs.long:
        blocks = max(1, min(searchable, int(seconds / (_SEARCHES * costs.long))))
        evaluations = int(seconds / (blocks * costs.long))
        left -= seconds + costs.both
    else:
        seconds = 0.0
    done, alive = 1, known + first + bool(evaluations)
    while done < most:
        alive = halved(alive)
        new = more(left, costs, alive, done, most)
        if new <= done:
            break
        left -= (new - done) * (alive * costs.both + costs.within)
        done = new
    if evaluations and done == most:  # nobody else has a use for what is left
        seconds += left
        evaluations = int(seconds / (blocks * costs.long))
    return Plan(first, done * BLOCK, evaluations, seconds, blocks)


def halved(alive: int) -> int:
    """How many stay in the next round."""
    return min(alive, max(KEPT, math.ceil(alive / 2)))


def more(left: float, costs: Costs, alive: int, done: int, most: int) -> int:
    """The blocks that a next round brings everybody to: twice as many, or what fits."""
    fits = int(left / (alive * costs.both + costs.within)) if left > 0 else 0
    return min(2 * done, most, done + fits)
