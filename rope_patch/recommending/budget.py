"""The time budget: the clock, the costs of blocks, and the plan of what fits."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

from rope_patch.evaluation.decision_plan import RunPlan
from rope_patch.recommending.sample_sets import BLOCK_SIZE
from rope_patch.searching.pipeline import MIN_EVALUATIONS
from rope_patch.utils.errors import Refused, printable
from rope_patch.utils.processes import Processes
from rope_patch.utils.terminal import format_duration, progress_bar

FINALISTS = 3  # halving stops at this number of rotations
_PREFERRED_EVALUATIONS = 40  # up to here, prefer evaluations over more samples per evaluation
_SEARCH_SHARE = 0.45  # share of the time that remains after the first round
_SAFETY_MARGIN = 1.1  # passes vary in time


class TimeBudget:
    """A budget of minutes, the time spent, and the costs of blocks.

    The time spent is the sum of what measurements took, which the journal stores with each. So a
    run that continues after a kill comes to the same choices, whatever the kill lost.

    Args:
        minutes: The budget, including runs with another budget in the same folder.
        earlier_seconds: Seconds of those runs.
        processes: All processes use the main process's clock.
        progress: Whether to show a bar on stderr.
    """

    def __init__(
        self, minutes: float, earlier_seconds: float, processes: Processes, progress: bool = True
    ) -> None:
        self._total = 60 * minutes
        self._spent = earlier_seconds
        self._counted_at = time.monotonic()
        self._processes = processes
        self._costs: dict[str, list[float]] = {}
        self._bar = progress_bar(
            total=round(self._total),
            disable=not (progress and processes.is_main),
            bar_format="{desc} {percentage:3.0f}% of the budget|{bar}| {postfix}",
        )

    def spent(self) -> float:
        """Return the seconds spent, the same in all processes."""
        return self._processes.broadcast(self._spent)

    def left(self) -> float:
        """Return the seconds left, the same in all processes."""
        return self._total - self.spent()

    def left_in_process(self) -> float:
        """Return the seconds left by this process's own clock."""
        return self._total - self._spent

    def share(self, plan: RunPlan | None) -> RunPlan | None:
        """Return the main process's plan, so that all processes decide alike."""
        return self._processes.broadcast(plan)

    def elapsed(self) -> float:
        """Return the seconds since a measurement was counted last."""
        return time.monotonic() - self._counted_at

    def count(self, seconds: float) -> None:
        """Count the seconds of a measurement, made now or by a run that was killed."""
        self._spent += seconds
        self._counted_at = time.monotonic()

    def record_cost(self, kind: str, seconds: float) -> None:
        """Record what one block of a kind took."""
        self._costs.setdefault(kind, []).append(seconds)

    def has_cost(self, kind: str) -> bool:
        """Return whether a block of a kind was measured."""
        return kind in self._costs

    def cost(self, kind: str) -> float:
        """Return the mean seconds of the measured blocks of a kind; 0 if there are none."""
        seconds = self._costs.get(kind, [])
        return self._processes.broadcast(sum(seconds) / len(seconds) if seconds else 0.0)

    def set_status(self, status: str) -> None:
        """Show what runs now, and how much time is left."""
        now = self._spent + self.elapsed()
        self._bar.set_description_str(status, refresh=False)
        self._bar.set_postfix_str(
            f"{format_duration(max(self._total - now, 0))} left", refresh=False
        )
        self._bar.n = min(round(now), self._bar.total)
        self._bar.refresh()

    def log(self, line: str) -> None:
        """Print a line on stderr, above the bar."""
        if not self._bar.disable:
            self._bar.write(printable(line), file=sys.stderr)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


class BudgetTooSmall(Refused):
    """The plain model and one method do not fit into the budget.

    Args:
        message: What was expected.
        minutes: About how many minutes they take, with those that are spent.
    """

    def __init__(self, message: str, minutes: float) -> None:
        super().__init__(message)
        self.minutes = minutes


@dataclass(frozen=True)
class BlockCosts:
    """The costs of a block in seconds.

    Attributes:
        long: A block at the target length.
        short: A block of answers and one of prose within the trained length.
    """

    long: float
    short: float

    @property
    def both(self) -> float:
        """Return the seconds of a block of each kind, for one method."""
        return self.long + self.short


@dataclass(frozen=True)
class BudgetPlan:
    """A plan of what fits into the budget.

    Attributes:
        first_rotations: Rotations to measure on a first block.
        samples: Samples to measure the best on.
        evaluations: About how many evaluations the search has; 0 if there is none.
        search_seconds: Seconds for the search.
        search_blocks: Blocks on which the search scores each candidate.
        seconds: About how long all of this takes.
    """

    first_rotations: int
    samples: int
    evaluations: int = 0
    search_seconds: float = 0.0
    search_blocks: int = 0
    seconds: float = 0.0


def minimum_seconds(costs: BlockCosts, short: float, measured: int = 0) -> float:
    """Return the seconds of the plain model and one method, with their controls.

    Args:
        costs: The costs of a block.
        short: Seconds of a block of answers within the trained length, which the competence check
            takes once more.
        measured: Methods measured already.
    """
    return _SAFETY_MARGIN * ((2 - measured) * costs.both + costs.long + (0 if measured else short))


def plan_budget(
    seconds_left: float,
    costs: BlockCosts,
    rotations: int,
    max_blocks: int,
    max_search_blocks: int,
    measured_rotations: int = 2,
) -> BudgetPlan:
    """Plan the time that is left.

    Each rotation gets a first block. Of the time that then remains, a search gets nearly half, if
    that is enough for one. The rest goes into successive halving: twice the samples for the best
    half, again and again. If the samples run out, the search gets the time that is left over.

    Args:
        seconds_left: Seconds left.
        costs: The costs of a block.
        rotations: Rotations still to be measured at the target length.
        max_blocks: Blocks of samples.
        max_search_blocks: Blocks of search samples; 0 if there can be no search.
        measured_rotations: Rotations measured already.
    """
    # Reserve the time of the best one's control, which is measured last.
    seconds_left = seconds_given = seconds_left / _SAFETY_MARGIN - costs.long
    first = max(0, min(rotations, int(seconds_left / costs.both)))
    seconds_left -= first * costs.both
    seconds = _SEARCH_SHARE * max(seconds_left, 0.0)
    blocks = evaluations = 0
    if max_search_blocks and seconds >= (MIN_EVALUATIONS + 1) * costs.long:
        blocks = max(
            1, min(max_search_blocks, int(seconds / (_PREFERRED_EVALUATIONS * costs.long)))
        )
        evaluations = int(seconds / (blocks * costs.long))
        seconds_left -= seconds + costs.both
    else:
        seconds = 0.0
    blocks_done, alive = 1, measured_rotations + first + bool(evaluations)
    while blocks_done < max_blocks:
        alive = halve(alive)
        next_blocks = next_block_count(seconds_left, costs, alive, blocks_done, max_blocks)
        if next_blocks <= blocks_done:
            break
        seconds_left -= (next_blocks - blocks_done) * (alive + 1) * costs.both
        blocks_done = next_blocks
    if evaluations and blocks_done == max_blocks:  # no more samples: the search gets the rest
        seconds, seconds_left = seconds + seconds_left, 0.0
        evaluations = int(seconds / (blocks * costs.long))
    total = seconds_given - seconds_left + costs.long
    return BudgetPlan(first, blocks_done * BLOCK_SIZE, evaluations, seconds, blocks, total)


def halve(alive: int) -> int:
    """Return how many rotations stay in the next round."""
    return min(alive, max(FINALISTS, math.ceil(alive / 2)))


def next_block_count(
    seconds_left: float, costs: BlockCosts, alive: int, blocks_done: int, max_blocks: int
) -> int:
    """Return the number of blocks after the next round: twice as many, or as many as fit.

    The plain model is measured in each round, dropped or not: the verdict is against it.

    Args:
        seconds_left: Seconds left.
        costs: The costs of a block.
        alive: Rotations in the round.
        blocks_done: Blocks that all of them have been measured on.
        max_blocks: Blocks of samples.
    """
    fits = int(seconds_left / ((alive + 1) * costs.both)) if seconds_left > 0 else 0
    return min(2 * blocks_done, max_blocks, blocks_done + fits)
