"""Test position maps against the papers' formulas, one query and one key at a time."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.written_out_maps import (
    dca,
    dpe,
    jet_long,
    leaky_rerope,
    lm_infinite,
    rerope,
    self_extend,
    streaming,
    string,
)

from rope_patch.methods import build

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["cases"]
REACH = 64


def growing_self_extend(i, j):
    """Groups as large as it takes for two thirds of the reach, and no larger."""
    window, span = REACH // 4, 2 * REACH // 3 - REACH // 4
    group = 2
    while (i + 1 - window) / group > span:
        group += 1
    return self_extend(i, j, window, group)


def lampe(i, j):
    """The length that a query is mapped by is the next one on the grid."""
    head, mapped, step = REACH // 8, 3 * REACH // 4, 0
    while i >= (length := math.ceil(REACH * 2 ** (step / 4))):
        step += 1
    place = lambda p: math.floor(p * mapped / (length - 1))  # noqa: E731
    return i - j if i - j <= head else place(i) + head - place(head) - 1 - place(j)


# Options, the relative position of i and j or None, the first query that is mapped.
CASES = {
    "rerope": ("rerope", {"window": 20}, lambda i, j: rerope(i, j, 20), REACH),
    "rerope by default": ("rerope", {}, lambda i, j: rerope(i, j, 16), REACH),
    "leaky": (
        "leaky-rerope",
        {"window": 9, "k": 2.5},
        lambda i, j: leaky_rerope(i, j, 9, 2.5),
        REACH,
    ),
    "self-extend": (
        "self-extend",
        {"window": 10, "group": 3},
        lambda i, j: self_extend(i, j, 10, 3),
        REACH,
    ),
    "self-extend by default": ("self-extend", {}, growing_self_extend, REACH),
    "jet-long": ("jet-long", {"window": 7}, lambda i, j: jet_long(i, j, 7, REACH), REACH),
    "dca": ("dca", {}, lambda i, j: dca(i, j, 48, 63), REACH),
    "dca, released": ("dca", {"sizes": "released"}, lambda i, j: dca(i, j, 40, 48), REACH),
    "dca, small": ("dca", {"chunk": 10, "top": 14}, lambda i, j: dca(i, j, 10, 14), REACH),
    "string": (
        "string",
        {"offset": 20, "local": 4},
        lambda i, j: string(i, j, 20, 4),
        20,
    ),
    "lampe": ("lampe", {}, lampe, REACH),
    "dpe": (
        "dpe",
        {"groups": [2, 5, 1, 8], "window": 9},
        lambda i, j: dpe(i, j, 9, (2, 5, 1, 8)),
        REACH,
    ),
    "lm-infinite": (
        "lm-infinite",
        {"window": 30, "sinks": 3},
        lambda i, j: lm_infinite(i, j, 30, 3),
        30,
    ),
    "streaming": ("streaming", {"sinks": 2}, lambda i, j: streaming(i, j, REACH - 2, 2), REACH),
}


def matrix(regions, queries, keys):
    """Return relative positions, `[Q, K]` or `[Q, K, N]`, and how often a query meets a key."""
    counts = torch.zeros(len(queries), len(keys), dtype=torch.long)
    relative = torch.full((len(queries), len(keys), 1), torch.nan, dtype=torch.float64)
    for region in regions:
        inside = (keys >= region.start[:, None]) & (keys < region.stop[:, None])
        a, b = queries.double()[:, None], keys.double()[:, None]
        if region.query_shift is not None:
            a = a + region.query_shift.view(len(queries), -1)
        if region.key_shift is not None:
            b = b + region.key_shift.view(len(keys), -1)
        relative = torch.where(inside[..., None], a[:, None] - b[None], relative)
        counts += inside
    return relative.squeeze(-1), counts


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['method']}-{c['tokens']}")
def test_maps_have_the_golden_positions(case):
    """All queries are mapped here, as the papers do."""
    places = torch.arange(case["tokens"])
    position_map = build(case["method"], **case["options"])
    regions = position_map.map_regions(places, places, case["tokens"], case["tokens"] - 1)
    relative, counts = matrix(regions, places, places)
    for i in range(case["tokens"]):
        seen = case["seen"][i] if "seen" in case else [1] * (i + 1)
        assert counts[i].tolist() == seen + [0] * (case["tokens"] - i - 1)
        for j in (j for j, visible in enumerate(seen) if visible):
            if case["method"] == "dpe":
                expected = [pair[i][j] for pair in case["relative"]]
            else:
                expected = case["relative"][i][j]
            assert relative[i, j].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_queries_beyond_the_start_are_mapped_by_the_formula(name):
    method, options, formula, start = CASES[name]
    position_map, length = build(method, **options), 230
    assert position_map.map_start(REACH) == start
    places = torch.arange(length)
    relative, counts = matrix(
        position_map.regions(places, places, REACH, length - 1), places, places
    )
    for i in range(length):
        for j in range(length):
            expected = None if j > i else i - j if i < start else formula(i, j)
            assert counts[i, j] == (expected is not None)
            if expected is not None:
                got = relative[i, j].tolist()
                if isinstance(expected, list) and not isinstance(got, list):
                    got = [got] * len(expected)
                if isinstance(got, list) and not isinstance(expected, list):
                    expected = [expected] * len(got)
                assert got == pytest.approx(expected, abs=1e-9), (i, j)


@pytest.mark.parametrize("name", CASES)
def test_a_query_is_mapped_the_same_whatever_comes_with_it(name):
    method, options, _, _ = CASES[name]
    position_map, keys = build(method, **options), torch.arange(300)
    whole, seen = matrix(position_map.regions(keys, keys, REACH, 299), keys, keys)
    for first, last in ((0, 299), (100, 101), (250, 300)):
        queries = keys[first:last]
        part, part_seen = matrix(
            position_map.regions(queries, keys, REACH, last - 1), queries, keys
        )
        assert torch.equal(part_seen, seen[first:last])
        part = part if part.ndim == whole.ndim else part[..., None].expand(whole[first:last].shape)
        assert torch.equal(part.nan_to_num(-1), whole[first:last].nan_to_num(-1))


@pytest.mark.parametrize("reach", [48, 64, 100])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dpe"])
def test_no_distance_is_beyond_the_reach_up_to_the_longest_text(name, reach):
    """Of dpe that holds for its slowest pairs alone: fast pairs have seen all angles."""
    method, options, _, _ = CASES[name]
    position_map = build(method, **options)
    length = int(min(position_map.longest_text(reach), 40 * reach))
    assert length > reach
    keys = torch.arange(length)
    queries = torch.cat([keys[: 2 * reach], keys[-reach:]])
    relative, counts = matrix(position_map.regions(queries, keys, reach, length - 1), queries, keys)
    assert relative[counts > 0].max() < reach
    assert relative[counts > 0].min() >= 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("leaky-rerope", {"window": 20, "k": 4}),
        ("self-extend", {"window": 16, "group": 4}),
        ("string", {"offset": 20, "local": 4}),
    ],
)
def test_the_longest_text_is_the_longest(method, options):
    position_map = build(method, **options)
    length = int(position_map.longest_text(REACH))
    largest = []
    for n in (length, length + 8):
        keys = torch.arange(n)
        relative, counts = matrix(position_map.regions(keys, keys, REACH, n - 1), keys, keys)
        largest.append(relative[counts > 0].max())
    assert largest[0] < REACH <= largest[1]
