"""Test intervals of shares against scipy, published values and simulated data."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics
from rope_patch.statistics import Interval


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("hits", "n"), [(0, 7), (1, 7), (7, 7), (43, 50), (250, 500)])
def test_wilson_equals_scipy(hits, n, confidence):
    expected = stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    got = statistics.wilson(hits, n, confidence)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert got.estimate == hits / n


def test_wilson_bounds_solve_the_score_equation_for_a_fractional_n():
    n, share = 12.7, 0.31
    got = statistics.wilson(share * n, n)
    for bound in (got.low, got.high):
        assert abs(share - bound) / math.sqrt(bound * (1 - bound) / n) == pytest.approx(1.959964)


def test_wilson_is_exact_at_the_ends():
    assert statistics.wilson(3.7, 3.7).high == 1
    assert statistics.wilson(0, 3.7).low == 0


def clustered_hits(generator, sets, clusters, size, share, correlation):
    """Return 0/1 scores `[sets, clusters * size]` with a beta-distributed share per cluster."""
    scale = 1 / correlation - 1
    shares = generator.beta(share * scale, (1 - share) * scale, (sets, clusters, 1))
    hits = generator.random((sets, clusters, size)) < shares
    return hits.reshape(sets, -1).astype(float)


def test_accuracy_of_independent_samples_equals_wilson():
    scores = [1.0] * 43 + [0.0] * 7
    got, expected = statistics.accuracy(scores), statistics.wilson(43, 50)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    singles = statistics.accuracy(scores, range(50))
    assert (singles.low, singles.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert singles.effective_n == pytest.approx(50)


def test_failed_samples_are_counted_and_excluded():
    got = statistics.accuracy([1, None, 0, 1, None, 1], ["a", "a", "a", "b", "b", "b"])
    assert (got.estimate, got.n, got.failed) == (0.75, 4, 2)


def test_texts_with_equal_scores_count_as_one_sample_each():
    scores = np.repeat([1.0] * 14 + [0.0] * 6, 5)
    got = statistics.accuracy(scores.tolist(), np.repeat(np.arange(20), 5).tolist())
    expected = stats.binomtest(14, 20).proportion_ci(method="wilson")
    assert got.effective_n == pytest.approx(20)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high))


def test_effective_n_is_n_over_the_design_effect():
    """The reference is the textbook formula of the linearised variance."""
    hits = clustered_hits(np.random.default_rng(3), 1, 40, 5, 0.6, 0.2)[0]
    sums, share = hits.reshape(40, 5).sum(axis=1), hits.mean()
    by_cluster = 40 / 39 * ((sums - 5 * share) ** 2).sum() / 200**2
    independent = share * (1 - share) / 199
    students = stats.t.ppf(0.975, 199) / stats.t.ppf(0.975, 39)
    got = statistics.accuracy(hits.tolist(), np.repeat(np.arange(40), 5).tolist())
    assert got.effective_n == pytest.approx(200 / (by_cluster / independent) * students**2)
    assert 40 < got.effective_n < 200


def test_equal_scores_count_as_one_sample_a_text():
    got = statistics.accuracy([1] * 50, np.repeat(np.arange(10), 5).tolist())
    assert got.effective_n == pytest.approx(10)
    assert round(got.low, 2) == 0.72
    assert statistics.accuracy([1] * 50, ["one"] * 50).effective_n == pytest.approx(1)


def test_texts_of_unequal_size_count_by_their_squares():
    """Kish: n² over the sum of squared sizes, so a large text weighs more."""
    got = statistics.accuracy([1] * 10, ["a"] * 8 + ["b", "c"])
    assert got.effective_n == pytest.approx(100 / 66)


def test_one_miss_more_never_raises_a_bound():
    texts = np.repeat(np.arange(10), 5).tolist()
    lows, highs = [], []
    for misses in range(4):
        scores = [float(i not in (0, 7, 21)[:misses]) for i in range(50)]
        lows.append(statistics.accuracy(scores, texts).low)
        highs.append(statistics.accuracy([1 - score for score in scores], texts).high)
    assert lows == sorted(lows, reverse=True)
    assert highs == sorted(highs)


def test_texts_that_cancel_out_are_never_narrower_than_independent_samples():
    scores = [1.0, 0.0] * 30
    got = statistics.accuracy(scores, np.repeat(np.arange(30), 2).tolist())
    assert got.effective_n == 60


@pytest.mark.parametrize(
    ("clusters", "size", "share", "correlation"),
    [(5, 10, 0.7, 0.3), (50, 5, 0.95, 0.2)],
)
def test_accuracy_covers_where_naive_wilson_does_not(clusters, size, share, correlation):
    generator = np.random.default_rng(11)
    texts = np.repeat(np.arange(clusters), size).tolist()
    covered = naive = 0
    for scores in clustered_hits(generator, 400, clusters, size, share, correlation).tolist():
        aware, plain = statistics.accuracy(scores, texts), statistics.accuracy(scores)
        covered += aware.low <= share <= aware.high
        naive += plain.low <= share <= plain.high
    assert covered / 400 >= 0.93
    assert naive / 400 < 0.91


def test_fractional_scores_are_covered():
    generator = np.random.default_rng(5)
    draws = generator.binomial(4, 0.85, (400, 30)) / 4
    intervals = [statistics.accuracy(scores.tolist()) for scores in draws]
    assert np.mean([i.low <= 0.85 <= i.high for i in intervals]) >= 0.95


@pytest.mark.parametrize("precision", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("expected", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_required_samples_is_the_first_n_that_is_precise(precision, expected, confidence):
    def holds(n):
        return statistics.is_precise(statistics.wilson(expected * n, n, confidence), precision)

    got = statistics.required_samples(precision, confidence, expected)
    assert got == next(n for n in itertools.count(1) if holds(n))


def test_required_samples_suffice_for_any_share():
    n = statistics.required_samples(0.1)
    assert all(statistics.is_precise(statistics.wilson(hits, n), 0.1) for hits in range(n + 1))
    assert statistics.required_samples(0.6) == 1


def test_an_interval_without_bounds_is_not_precise():
    assert not statistics.is_precise(Interval(math.nan, math.nan, math.nan, 3, 3), 1)
    assert not statistics.is_precise(Interval(1, 0, math.inf, 3, 3), 1)


# -- refusals of the room --------------------------------------------------------------------------

UNDEFINED = Interval(math.nan, 0, 1, 1, 1)
REFUSED = [
    *((statistics.wilson, counts, "successes") for counts in ((0, 0), (6, 5), (-1, 5))),
    (statistics.wilson, (math.nan, 5), "successes"),
    *((statistics.wilson, (1, 2, confidence), r"0\.95") for confidence in (0, 1, 95)),
    *((statistics.accuracy, (scores,), "at least one score") for scores in ([], [None, None])),
    *((statistics.accuracy, ([0.5, x],), r"in 0\.\.1") for x in (-0.1, 85.6, math.nan)),
    (statistics.accuracy, ([0, 1], [1]), "each of 2"),
    *((statistics.required_samples, (x,), "as shares") for x in (0, -1)),
    (statistics.required_samples, (0.1, 0.95, 85), "as shares"),
    *((statistics.clustered_mean, (x, range(len(x))), "values") for x in ([], [math.nan])),
    *((statistics.mean_test, (x, range(len(x))), "values") for x in ([], [1.0, math.inf])),
    (statistics.retention, (UNDEFINED, statistics.wilson(1, 2)), "at least 0"),
    (statistics.stratified_mean, ([],), "at least one"),
    (statistics.usable_length, ({}, 0.85), "at one length at least"),
    (statistics.look_factor, (-1,), "at least 0"),
    *((statistics.smallest_effect, (4, 1.0, level), "expected") for level in (0.0, 1.0)),
    *((statistics.smallest_effect, (4, 1.0, 0.05, power), "expected") for power in (0.5, 1.0)),
    (statistics.smallest_effect, (4, 0), "expected"),
    (statistics.required_texts, (-1, 1.0), "above 0, got -1"),
    (statistics.mcnemar, ([1, 0], [1]), "both methods"),
    (statistics.mcnemar, ([1, None], [None, 0]), "at least one pair"),
    (statistics.holm, ([0.1, math.nan],), r"0\.\.1"),
    (statistics.perplexity_interval, ([[], []],), "at least one block"),
    *((statistics.perplexity_interval, ([[1.0, 2.0]], [w]), "above 0") for w in ([64], [0, 64])),
    (statistics.perplexity_ratio, ([[1.0, 2.0]], [[1.0]]), "same blocks"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "fact"),
    REFUSED,
    ids=[f"{function.__name__}{arguments}" for function, arguments, _ in REFUSED],
)
def test_what_cannot_be_computed_is_refused(function, arguments, fact):
    with pytest.raises(ValueError, match=fact):
        function(*arguments)
