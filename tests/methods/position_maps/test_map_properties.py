"""Compare every map with the papers' formulas, one query and key at a time, and test its bounds."""

import math

import pytest
import torch
from paper_formulas import FORMULAS
from relative_positions import relative_positions

from rope_patch.methods import build

# Method, positions that the frequencies reach, options.
CASES = [
    ("self-extend", 32, {}),
    ("self-extend", 30, {"window": 7}),
    ("self-extend", 24, {"window": 10, "group": 3}),
    ("self-extend", 24, {"window": 8, "group": 4}),
    ("jet-long", 32, {}),
    ("jet-long", 17, {"window": 16}),
    ("jet-long", 20, {"window": 5, "group": 3}),
    ("rerope", 32, {}),
    ("rerope", 20, {"window": 19}),
    ("leaky-rerope", 32, {}),
    ("leaky-rerope", 24, {"window": 9, "k": 2.5}),
    ("leaky-rerope", 24, {"window": 9, "k": 1}),
    ("leaky-rerope", 24, {"window": 9, "k": 0.25}),
    ("dca", 32, {}),
    ("dca", 32, {"sizes": "released"}),
    ("dca", 20, {"chunk": 7, "top": 6}),
    ("dca", 20, {"chunk": 6, "top": 19}),
    ("string", 32, {}),
    ("string", 20, {"offset": 12, "local": 3}),
    ("lampe", 32, {}),
    ("lampe", 40, {"mapped": 20, "head": 9}),
    ("dpe", 32, {"groups": [2, 8, 3, 1]}),
    ("dpe", 20, {"groups": [4, 6], "window": 7}),
    ("lm-infinite", 32, {}),
    ("lm-infinite", 24, {"window": 9, "sinks": 3, "limit": 20}),
    ("streaming", 32, {}),
    ("streaming", 24, {"window": 9, "sinks": 5}),
]
CASE = pytest.mark.parametrize(("name", "reach", "options"), CASES)
# With k below 1, leaky ReRoPE trains on distances beyond the reach; all others stay within it.
WITHIN_REACH = [case for case in CASES if case[2].get("k", 1) >= 1]
WINDOWS = ("lm-infinite", "streaming")
GROWING = [
    case for case in CASES if case[0] in ("self-extend", "jet-long") and "group" not in case[2]
]


def lay_out(method, reach, queries, last_query=None):
    keys = torch.arange(int(queries.max()) + 1)
    last = len(keys) - 1 if last_query is None else last_query
    return relative_positions(method.regions(queries, keys, reach, last), queries, keys)


def tokens_of(method, reach):
    """Return the tokens of a text far beyond the reach, as long as the map allows."""
    return int(min(method.longest_text(reach), 3 * reach))


@CASE
def test_each_query_and_key_follow_the_paper(name, reach, options):
    """Regions cover the causal triangle once, but for what windows leave out."""
    method = build(name, **options)
    tokens, start = tokens_of(method, reach), method.map_start(reach)
    matrix, counts = lay_out(method, reach, torch.arange(tokens))
    matrix = matrix if matrix.ndim == 3 else matrix[..., None]
    unseen = [math.nan] * matrix.shape[-1]
    rows = []
    for i in range(tokens):
        for j in range(tokens):
            expected = i - j if j <= i else None
            if start <= i >= j:
                expected = FORMULAS[name](i, j, reach, **options)
            if expected is None:
                expected = unseen
            rows.append(expected if isinstance(expected, list) else [expected] * matrix.shape[-1])
    expected = torch.tensor(rows, dtype=torch.float64).view(matrix.shape)
    assert torch.equal(counts, expected[..., 0].isfinite().long())
    assert torch.equal(counts, torch.ones_like(counts).tril()) == (name not in WINDOWS)
    assert (counts.diagonal() == 1).all()  # a query sees itself
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-9, equal_nan=True)


@CASE
def test_queries_before_the_map_keep_their_distances(name, reach, options):
    method = build(name, **options)
    start = method.map_start(reach)
    matrix, counts = lay_out(method, reach, torch.arange(start))
    positions = torch.arange(start)
    distance = (positions[:, None] - positions).double()
    distance = distance if matrix.ndim == 2 else distance[..., None].expand_as(matrix)
    assert torch.equal(counts, torch.ones_like(counts).tril())
    assert torch.equal(matrix[counts > 0], distance[counts > 0])


@CASE
def test_a_query_is_mapped_by_what_it_sees_alone(name, reach, options):
    method = build(name, **options)
    tokens = tokens_of(method, reach)
    whole, whole_counts = lay_out(method, reach, torch.arange(tokens))
    # A batch may have a longer row, so the last query is not always of this text.
    for size, has_longer_row in ((1, False), (7, True), (reach, False)):
        for chunk in torch.arange(tokens).split(size):
            last = 9 * reach if has_longer_row else int(chunk[-1])
            matrix, counts = lay_out(method, reach, chunk, last)
            width = counts.shape[1]
            assert torch.equal(counts, whole_counts[chunk, :width])
            expected = whole[chunk, :width]
            assert torch.equal(matrix.nan_to_num(-1), expected.nan_to_num(-1))


@CASE
def test_rows_of_a_batch_have_positions_of_their_own(name, reach, options):
    method = build(name, **options)
    tokens = tokens_of(method, reach)
    rows = torch.stack([torch.arange(tokens), (torch.arange(tokens) - 5).clamp(min=0)])
    together = method.regions(rows, rows, reach, tokens - 1)
    for row in range(2):
        alone = method.regions(rows[row], rows[row], reach, tokens - 1)
        for one, both in zip(alone, together, strict=True):
            assert torch.equal(both.start[row], one.start)
            assert torch.equal(both.stop[row], one.stop)
            for ours, theirs in (
                (both.query_shift, one.query_shift),
                (both.key_shift, one.key_shift),
            ):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours[row], theirs)


def of_deciding_pairs(matrix, name, options):
    """Return a matrix's part for the pairs that decide how long a text may be.

    With dpe these have the largest group; the authors' smaller ones go further.
    """
    return matrix[..., options["groups"].index(max(options["groups"]))] if name == "dpe" else matrix


@pytest.mark.parametrize(("name", "reach", "options"), WITHIN_REACH)
def test_no_relative_position_leaves_the_reach(name, reach, options):
    method = build(name, **options)
    tokens = int(min(method.longest_text(reach), 12 * reach))
    matrix, counts = lay_out(method, reach, torch.arange(tokens))
    matrix = of_deciding_pairs(matrix, name, options)
    assert matrix[counts > 0].min() >= 0
    assert matrix[counts > 0].max() < reach


@pytest.mark.parametrize(
    ("name", "reach", "options"),
    [
        case
        for case in WITHIN_REACH
        if math.isfinite(build(case[0], **case[2]).longest_text(case[1]))
    ],
)
def test_the_longest_text_could_not_be_longer(name, reach, options):
    method = build(name, **options)
    # Floors of a group, or of a fraction, allow no more than a group of further tokens.
    tokens = int(method.longest_text(reach)) + 1
    keys = torch.arange(tokens)
    regions = method.regions(keys[-1:], keys, reach, tokens - 1)
    matrix, counts = relative_positions(regions, keys[-1:], keys)
    matrix = of_deciding_pairs(matrix, name, options)
    assert matrix[counts > 0].max() >= reach - (name == "leaky-rerope")


@pytest.mark.parametrize(("name", "reach", "options"), GROWING)
def test_growing_groups_are_the_smallest_that_fit(name, reach, options):
    method = build(name, **options)
    window = method.window_of(reach)
    limit, beyond = {"self-extend": (2 * reach // 3, window), "jet-long": (reach, 0)}[name]
    for query in range(reach, 40 * reach):
        group = method.group_at(query, reach)
        assert beyond + (query + 1 - beyond) / group <= limit
        assert beyond + (query + 1 - beyond) / (group - 1) > limit
        assert method.first_query_of(group, reach) <= query
        assert query < method.first_query_of(group + 1, reach)
