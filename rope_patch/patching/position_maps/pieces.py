"""Cut the regions of consecutive queries into pieces that fused attention computes at full speed.

A region gives each query an interval of keys. Over consecutive queries, its ends stay where they
are or move on with the queries. So a region falls into rectangles, which need no mask, triangles,
which are causal, and bands, which are computed in short blocks of queries under a small mask. Taken
together they are the causal triangle: nothing is computed twice but the corners of the bands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_BAND_BLOCK = 256  # queries


@dataclass(frozen=True)
class Piece:
    """Queries and keys of one fused call, as places in their tensors.

    Attributes:
        region: Place of the region in the map's list.
        queries: Where the queries are.
        keys: Where the keys are.
        is_causal: Whether query n of the piece sees its first n + 1 keys alone.
        band: Keys that each query sees, query n from its n-th on; 0 if it sees all.
    """

    region: int
    queries: slice
    keys: slice
    is_causal: bool = False
    band: int = 0


def cut_region(region: int, start: np.ndarray, stop: np.ndarray) -> Iterator[Piece]:
    """Yield the pieces of a region.

    Args:
        region: Place of the region in the map's list.
        start: First place of each query's keys, `[Q]`.
        stop: The place behind the last one; no key where it is not above `start`.
    """
    rows = np.flatnonzero(stop > start)
    if not len(rows):
        return
    steps = np.stack([np.diff(rows), np.diff(start[rows]), np.diff(stop[rows])])
    is_regular = (steps[0] == 1) & (steps[1:] >= 0).all(0) & (steps[1:] <= 1).all(0)
    first = 0
    while first < len(rows):
        last = first  # of a segment whose ends move alike
        while (
            last < len(rows) - 1
            and is_regular[last]
            and (steps[1:, last] == steps[1:, first]).all()
        ):
            last = _end_of_run(steps, is_regular, first, last)
        moves = (0, 0) if last == first else tuple(steps[1:, first])
        row = int(rows[first])
        yield from _cut_segment(
            region, row, last - first + 1, int(start[row]), int(stop[row]), moves
        )
        first = last + 1


def _end_of_run(steps: np.ndarray, is_regular: np.ndarray, first: int, last: int) -> int:
    """Return the last query of the run of equal steps that begins at `first`."""
    same = is_regular[last:] & (steps[1:, last:] == steps[1:, first][:, None]).all(0)
    broken = np.flatnonzero(~same)
    return last + (int(broken[0]) if len(broken) else len(same))


def _cut_segment(
    region: int, row: int, count: int, start: int, stop: int, moves: tuple[int, ...]
) -> Iterator[Piece]:
    """Yield the pieces of `count` queries from `row` on, whose first one sees start to stop."""
    queries = slice(row, row + count)
    if moves == (0, 0):
        yield Piece(region, queries, slice(start, stop))
    elif moves == (0, 1):
        if stop - 1 > start:
            yield Piece(region, queries, slice(start, stop - 1))
        yield Piece(region, queries, slice(stop - 1, stop - 1 + count), is_causal=True)
    elif moves == (1, 1):
        for first in range(0, count, _BAND_BLOCK):
            size = min(_BAND_BLOCK, count - first)
            keys = slice(start + first, stop + first + size - 1)
            rows = slice(row + first, row + first + size)
            band = stop - start if size > 1 else 0
            yield Piece(region, rows, keys, band=band)
    else:  # the first keys leave while the last stay
        for n in range(count):
            yield Piece(region, slice(row + n, row + n + 1), slice(start + n, stop))
