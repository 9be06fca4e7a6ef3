"""The processes of one run: how they divide work, wait for one another and free memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

Item = TypeVar("Item")


class Processes:
    """The processes that `accelerate launch` or torchrun started, or a single one.

    Each process holds the whole model. The processes share the work, and each writes its results
    to a file that the others read.

    Args:
        alone: Whether this process does all the work, even if there are others.

    Attributes:
        rank: The rank of this process.
        size: The number of processes.
    """

    def __init__(self, alone: bool = False) -> None:
        environment = {} if alone else os.environ
        self.rank, self.size = (
            int(environment.get("RANK", 0)),
            int(environment.get("WORLD_SIZE", 1)),
        )
        self._state: Any = None
        if self.size > 1:
            import torch
            from accelerate import PartialState

            # Without `cpu`, accelerate takes every process on a CPU for a separate run. One process
            # may finish hours before another, so the timeout is long.
            on_cpu = not torch.cuda.is_available()
            self._state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
            if self._state.num_processes != self.size:
                raise ValueError(
                    f"expected {self.size} processes (WORLD_SIZE), accelerate found "
                    f"{self._state.num_processes}: start them with accelerate launch or torchrun, "
                    "or unset RANK and WORLD_SIZE"
                )

    @property
    def is_main(self) -> bool:
        """Return whether this is the main process, which writes reports."""
        return self.rank == 0

    @property
    def device(self) -> Any:
        """Return this process's own device, or None where there is only one process."""
        return None if self._state is None else self._state.device

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def own_share(self, items: Sequence[Item], cost: Callable[[Item], float]) -> list[Item]:
        """Return this process's part of a list: neighbours stay together, costs are about equal.

        Args:
            items: All items, in the same order in every process.
            cost: Returns the cost of an item.
        """
        total, cost_before, own_items = sum(map(cost, items)), 0.0, []
        for item in items:
            middle = cost_before + cost(item) / 2
            if min(int(self.size * middle / total), self.size - 1) == self.rank:
                own_items.append(item)
            cost_before += cost(item)
        return own_items

    def broadcast(self, value: Item) -> Item:
        """Return the main process's value in every process."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def run_on_main(self, task: Callable[[], Item]) -> Item:
        """Call a function in the main process; return what it returns in every process.

        Args:
            task: The function; what it returns or raises must be picklable.

        Raises:
            Exception: The function's own, in every process.
        """
        if self.size == 1:
            return task()
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_main:
            try:
                outcome = (task(), None)
            except Exception as error:
                outcome = (None, error)
        value, problem = self.broadcast(outcome)
        if problem is not None:
            raise problem
        return value


def free_memory() -> None:
    """Free the memory of objects that nothing holds any more, for the next model or measurement."""
    import torch

    gc.collect()  # a failure's traceback and frames form cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
