"""Test pieces of a region, attention over them, and merging against one softmax in float64."""

import numpy as np
import pytest
import torch

from rope_patch.methods import build
from rope_patch.patching import cut_region
from rope_patch.patching.position_maps.parts import (
    MergedParts,
    _on_cuda,
    attend_in_torch,
    attend_part,
)

HOW = {
    "all": lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool),
    "causal": lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool).tril(),
    "band": lambda rows, columns: (
        torch.ones(rows, columns, dtype=torch.bool).triu().tril(columns - rows)
    ),
}


def random(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def softmax_attention(query, key, value, seen, scaling):
    """Return attention and log-sum-exp in float64."""
    groups = query.shape[1] // key.shape[1]
    query = query.double()
    key, value = (each.double().repeat_interleave(groups, 1) for each in (key, value))
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


SHAPES = [(1, 40, "all"), (20, 70, "all"), (33, 33, "causal"), (1, 40, "band"), (20, 70, "band")]


@pytest.mark.parametrize(
    ("dtype", "groups"), [(torch.float32, 3), (torch.bfloat16, 3), (torch.float64, 1)]
)
@pytest.mark.parametrize(("rows", "columns", "how"), SHAPES)
@pytest.mark.parametrize("function", [attend_part, attend_in_torch])
def test_parts_match_softmax(function, rows, columns, how, groups, dtype):
    query, key, value = random(
        (2, 2 * groups, rows, 16), (2, 2, columns, 16), (2, 2, columns, 16), dtype=dtype
    )
    seen = HOW[how](rows, columns)
    expected, expected_lse = softmax_attention(query, key, value, seen, 0.3)
    options = {"causal": {"is_causal": True}, "band": {"mask": seen}, "all": {}}[how]
    output, lse = function(query, key, value, 0.3, **options)
    atol = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=atol)


LAYOUTS = {
    "heads behind tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens behind components": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every other component": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "part of a wider head": lambda x: torch.cat([x, x], -1)[..., 3:19],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", range(3))
def test_parts_read_no_other_memory(which, layout):
    parts = random(*[(1, 2, 20, 16)] * 3)
    parts[which] = LAYOUTS[layout](parts[which])
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    expected, expected_lse = softmax_attention(*parts, seen, 0.25)
    output, lse = attend_part(*parts, 0.25, is_causal=True)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "value_width", "dtypes"),
    [
        (16, 24, (torch.float32,) * 3),
        (16, 16, (torch.float32, torch.float32, torch.float64)),
        (7, 7, (torch.float32,) * 3),
    ],
    ids=["other width", "other dtype", "odd width"],
)
def test_parts_that_the_operator_does_not_take_are_computed_in_plain_torch(
    width, value_width, dtypes
):
    shapes = (1, 2, 20, width), (1, 2, 20, width), (1, 2, 20, value_width)
    parts = [each.to(dtype) for each, dtype in zip(random(*shapes), dtypes, strict=True)]
    expected, _ = softmax_attention(*parts, torch.ones(20, 20, dtype=torch.bool), 0.25)
    output, _ = attend_part(*parts, 0.25)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", [None, torch.ones(20, 20, dtype=torch.bool)])
def test_kernels_of_gpus_run_only_where_torch_would_choose_them(mask):
    """Tensors on a CPU are such a case: nothing is computed from memory of another device."""
    assert _on_cuda(*random(*[(1, 2, 20, 16)] * 3), 0.25, False, mask) is None


@pytest.mark.parametrize("sinks", [False, True])
def test_merged_parts_are_one_softmax(sinks):
    query, key, value, logits = random(
        (2, 4, 30, 16), (2, 2, 50, 16), (2, 2, 50, 16), (4,), dtype=torch.float64
    )
    merged = MergedParts(query, value)
    spans = [
        (slice(0, 30), slice(0, 20)),
        (slice(10, 30), slice(20, 35)),
        (slice(29, 30), slice(35, 50)),
    ]
    seen = torch.zeros(30, 50, dtype=torch.bool)
    for rows, columns in spans:
        seen[rows, columns] = True
        merged.add(
            rows, *attend_part(query[:, :, rows], key[:, :, columns], value[:, :, columns], 0.5)
        )
    expected, lse = softmax_attention(query, key, value, seen, 0.5)
    if sinks:
        merged.add_sinks(logits)
        share = lse.exp() / (lse.exp() + logits.exp().view(1, -1, 1))
        expected = expected * share[..., None]
    torch.testing.assert_close(merged.output, expected, rtol=0, atol=1e-12)


# -- pieces of regions: their keys, each once, without wasted work ---------------------------------

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


@pytest.mark.parametrize("seed", range(6))
def test_any_intervals_are_cut_exactly(seed):
    random = np.random.default_rng(seed)
    start = random.integers(0, 30, 60)
    stop = start + random.integers(-3, 20, 60)
    if seed % 2:  # ends that move on, as those of maps do
        start, stop = np.sort(start), np.sort(stop)
    counts = seen_keys(cut_region(0, start, stop), 60, 60)
    keys = np.arange(60)[None]
    assert np.array_equal(counts, (keys >= start[:, None]) & (keys < stop[:, None]))
