"""Lay out the regions of a position map as a matrix of relative positions."""

import torch


def relative_positions(regions, queries, keys):
    """Return relative positions and how many regions hold each pair of query and key.

    Args:
        regions: Of the queries, which are one-dimensional.
        queries: Positions, `[Q]`.
        keys: Positions, `[K]`.

    Returns:
        Float64, `[Q, K]` or `[Q, K, P]`, NaN where no region has the key; counts, `[Q, K]`.
    """
    pairs = max((r.query_shift.shape[1:].numel() for r in regions if is_by_pair(r)), default=1)
    matrix = torch.full((len(queries), len(keys), pairs), torch.nan, dtype=torch.float64)
    counts = torch.zeros(len(queries), len(keys), dtype=torch.long)
    for region in regions:
        inside = (keys >= region.start[:, None]) & (keys < region.stop[:, None])
        query, key = (
            moved(x, shift)
            for x, shift in ((queries, region.query_shift), (keys, region.key_shift))
        )
        relative = (query[:, None] - key[None]).expand_as(matrix)
        matrix = torch.where(inside[..., None], relative, matrix)
        counts += inside
    return matrix.squeeze(-1), counts


def is_by_pair(region):
    """Return whether a region has a shift for each rotated pair."""
    return region.query_shift is not None and region.query_shift.ndim == 2


def moved(positions, shift):
    """Return shifted positions, `[N, 1]` or `[N, P]`."""
    positions = positions.double()[:, None]
    if shift is None:
        return positions
    return positions + (shift if shift.ndim == 2 else shift[:, None])
