"""How accelerate's processes share the rows of a run."""

from __future__ import annotations

from typing import Any, NamedTuple


class ProcessLayout(NamedTuple):
    """Distribution of the work over processes.

    Attributes:
        context_parallel: Processes that hold parts of the same rows.
        reader_index: Index of this process among those that read different rows.
        reader_count: Number of processes that read different rows.
        replicas: Rows in training at once, per row in a batch.
    """

    context_parallel: int
    reader_index: int
    reader_count: int
    replicas: int


def process_layout(accelerator: Any) -> ProcessLayout:
    """Return how accelerate's processes share the work.

    Under DeepSpeed's sequence parallelism each process reads different rows, which are split over
    the processes one after the other.
    """
    sizes = getattr(accelerator, "parallelism_config", None)
    processes_per_row = 1 if sizes is None else sizes.cp_size * sizes.tp_size
    readers = accelerator.num_processes // processes_per_row
    return ProcessLayout(
        context_parallel=1 if sizes is None else sizes.cp_size,
        reader_index=accelerator.process_index // processes_per_row,
        reader_count=readers,
        replicas=readers // getattr(sizes, "sp_size", 1),
    )
