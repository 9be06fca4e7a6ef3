"""Lengths of sequences, from their tokens' positions, over all processes that share them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState


def first_and_last_positions(positions: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the lowest and the highest position of each row; waits for their device.

    Args:
        positions: `[B, S]`, or `[B, S, A]` on several axes; -1 where there is no token.
        group: The processes that hold other parts of the same rows, if any.

    Returns:
        `[B, 2]`, float64, on the CPU; a row without tokens has its last position before its first.
    """
    positions = positions.flatten(1).long()  # narrower types cannot hold the marker for no position
    real = positions >= 0
    last = torch.where(real, positions, -1).amax(1)
    first = torch.where(real, positions, torch.iinfo(torch.int64).max).amin(1)
    if group is not None:
        ends = torch.cat([last, -first])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        last, first = ends[: len(last)], -ends[len(last) :]
    return torch.stack([torch.minimum(first, last + 1), last], dim=1).to("cpu", torch.float64)


def token_extents(positions: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the lowest and the highest position of a single token, over its axes.

    Args:
        positions: `[B, 1]` or `[B, 1, A]`; read from their device at once.

    Returns:
        Two lists of B numbers.
    """
    rows = positions.flatten(1).tolist()
    return [min(row) for row in rows], [max(row) for row in rows]


def extend_spans(row_spans: torch.Tensor, lowest: list[float], highest: list[float]) -> bool:
    """Extend each row's span by one token and return True, if all frequencies serve them.

    Args:
        row_spans: See `RotationRecord`; updated in place.
        lowest: The token's lowest position in each row, negative where a mask hides it.
        highest: Its highest position.
    """
    # Python and NumPy numbers are fastest for the few rows of a batch.
    spans = []
    for (first, last, valid_until), low, high in zip(
        row_spans.tolist(), lowest, highest, strict=True
    ):
        if low >= 0:
            first, last = min(first, low), max(last, high)
        if not last + 1 - first <= valid_until:  # also False if the span is unknown (NaN)
            return False
        spans.append((first, last))
    row_spans.numpy()[:, :2] = spans
    return True


def context_parallel_group() -> Any:
    """Return the processes that share sequences in accelerate's context parallelism, or None."""
    shared = AcceleratorState._shared_state
    parallelism = shared.get("parallelism_config") if shared else None
    if parallelism is None or not parallelism.cp_enabled:
        return None
    return AcceleratorState().device_mesh["cp"].get_group()
