"""T5's relative positions: distances in buckets, a learned bias for each (arXiv:1910.10683)."""

from __future__ import annotations

import math

import torch

from rope_patch.utils.errors import Refused


def t5_bucket(
    relative: torch.Tensor,
    *,
    bidirectional: bool = False,
    buckets: int = 32,
    max_distance: int = 128,
) -> torch.Tensor:
    """Return the bucket of each relative position.

    Half of a direction's buckets hold one distance each, the others grow evenly in the logarithm
    up to `max_distance`, and the last one holds all beyond. The logarithm is in float32, as in the
    models: in float64 some borders would move.

    Args:
        relative: Key position - query position, whole numbers of any shape.
        bidirectional: Whether keys may lie ahead, which takes half of the buckets; if not, all
            keys ahead are in bucket 0.
        buckets: Rows of the learned table.
        max_distance: Where the last bucket begins, at the latest.
    """
    offset = torch.zeros_like(relative)
    distance = -relative.clamp(max=0)
    if bidirectional:
        buckets //= 2
        offset, distance = (relative > 0) * buckets, relative.abs()
    exact = exact_distances(buckets)
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def exact_distances(buckets: int, *, bidirectional: bool = False) -> int:
    """Return how many distances of a direction have a bucket of their own: half of its buckets."""
    return buckets // (4 if bidirectional else 2)


def squeeze_tail(
    distances: torch.Tensor, *, trained: int, length: int | torch.Tensor, exact: int = 16
) -> torch.Tensor:
    """Return distances of which near ones stay and far ones move into the trained ones.

    Distances from `exact` to `length` are spread over `exact` to `trained` evenly in their
    logarithm, and rounded down.

    Args:
        distances: Whole numbers from 0, of any shape.
        trained: The longest distance in training.
        length: The longest distance to come, above `trained`; or a tensor of one number on the
            distances' device, which is not read: at `trained`, all distances stay.
        exact: Distances below it stay.

    Raises:
        ValueError: Nothing lies between `exact` and the lengths.
    """
    if exact >= trained or (isinstance(length, int) and length <= trained):
        raise Refused(
            f"expected exact < trained < length, got {exact:,}, {trained:,} and {length:,}"
        )
    reach: float | torch.Tensor = (
        math.log(length / exact) if isinstance(length, int) else (length.double() / exact).log()
    )
    power = math.log(trained / exact) / reach
    far = exact * (distances.clamp(min=exact).double() / exact) ** power
    return torch.where(distances < exact, distances, (far + 1e-9).floor().long())
