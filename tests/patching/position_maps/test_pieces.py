"""Test that the pieces of a region are its keys, each once, without wasted work."""

import numpy as np
import pytest
import torch

from rope_patch.methods import build
from rope_patch.patching.position_maps.pieces import cut_region

MAPS = {
    "rerope": {"window": 700},
    "self-extend": {"window": 300},
    "jet-long": {"window": 1},
    "dca": {"chunk": 500},
    "string": {},
    "lampe": {},
    "lm-infinite": {"window": 900, "sinks": 5},
    "streaming": {"window": 600},
}


def seen_keys(pieces, queries, keys):
    """Return how often each query sees each key."""
    counts = np.zeros((queries, keys), dtype=int)
    for piece in pieces:
        rows = piece.queries.stop - piece.queries.start
        columns = piece.keys.stop - piece.keys.start
        offset = np.arange(columns)[None] - np.arange(rows)[:, None]
        visible = np.ones((rows, columns), dtype=bool)
        if piece.is_causal:
            assert rows == columns
            visible = offset <= 0
        if piece.band:
            assert columns == rows + piece.band - 1
            visible = (offset >= 0) & (offset < piece.band)
        assert visible.any(1).all()  # kernels disagree about queries that see nothing
        counts[piece.queries, piece.keys] += visible
    return counts


@pytest.mark.parametrize(("past", "steps"), [(0, 2600), (1500, 700), (2599, 1), (1023, 3)])
@pytest.mark.parametrize("name", MAPS)
def test_pieces_are_the_causal_triangle_or_what_the_map_shows_of_it(name, past, steps):
    position_map, reach = build(name, **MAPS[name]), 1024
    queries, keys = torch.arange(past, past + steps), torch.arange(past + steps)
    total = np.zeros((steps, past + steps), dtype=int)
    for index, region in enumerate(position_map.regions(queries, keys, reach, past + steps - 1)):
        pieces = list(cut_region(index, region.start.numpy(), region.stop.numpy()))
        counts = seen_keys(pieces, steps, past + steps)
        inside = (keys[None] >= region.start[:, None]) & (keys[None] < region.stop[:, None])
        assert np.array_equal(counts, inside.numpy())
        total += counts
    is_causal = (keys[None] <= queries[:, None]).numpy()
    if name in ("lm-infinite", "streaming"):
        assert (total <= is_causal).all()
    else:
        assert np.array_equal(total, is_causal)


def test_long_prompts_need_few_calls_and_no_more_work_than_the_triangle():
    length, reach = 32_768, 8192
    queries = torch.arange(length)
    calls = work = 0
    regions = build("self-extend").regions(queries, queries, reach, length - 1)
    for index, region in enumerate(regions):
        for piece in cut_region(index, region.start.numpy(), region.stop.numpy()):
            rows = piece.queries.stop - piece.queries.start
            columns = piece.keys.stop - piece.keys.start
            calls += 1
            work += rows * columns // (2 if piece.is_causal else 1)
    assert calls < 150
    assert work < 1.05 * length * length / 2


@pytest.mark.parametrize("seed", range(20))
def test_any_intervals_are_cut_exactly(seed):
    random = np.random.default_rng(seed)
    start = random.integers(0, 30, 60)
    stop = start + random.integers(-3, 20, 60)
    if seed % 2:  # ends that move on, as those of maps do
        start, stop = np.sort(start), np.sort(stop)
    counts = seen_keys(cut_region(0, start, stop), 60, 60)
    keys = np.arange(60)[None]
    assert np.array_equal(counts, (keys >= start[:, None]) & (keys < stop[:, None]))
