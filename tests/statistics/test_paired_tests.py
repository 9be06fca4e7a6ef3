"""Test paired tests against scipy, enumeration and simulated data."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 0), (7, 2), (4, 4), (2, 9)])
def test_mcnemar_equals_enumeration(wins, losses):
    a = [1.0] * wins + [0.0] * losses + [1.0, 0.0]
    b = [0.0] * wins + [1.0] * losses + [1.0, 0.0]
    sides = list(itertools.product((0, 1), repeat=wins + losses))
    extreme = [abs(2 * sum(s) - len(s)) >= abs(wins - losses) for s in sides]
    got = statistics.mcnemar(a, b)
    assert got.test == "McNemar exact"
    assert got.p_value == pytest.approx(np.mean(extreme))
    assert got.p_value == pytest.approx(
        stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1
    )
    assert (got.wins, got.losses, got.ties) == (wins, losses, 2)
    assert got.difference.estimate == pytest.approx((wins - losses) / (wins + losses + 2))


def test_sign_flips_of_single_pairs_equal_mcnemar():
    a, b = [1] * 9 + [0] * 2 + [1] * 5, [0] * 9 + [1] * 2 + [1] * 5
    exact = statistics.mcnemar(a, b)
    enumerated = statistics.paired_difference(a, b, resamples=5000)
    sampled = statistics.paired_difference(a, b, resamples=1000)
    assert enumerated.p_value == pytest.approx(exact.p_value, abs=1e-12)
    assert sampled.p_value == pytest.approx(exact.p_value, abs=0.02)
    assert exact.difference == statistics.paired_difference(a, b).difference


def test_clustered_p_value_equals_scipys_permutation_of_the_clusters_sums():
    generator = np.random.default_rng(4)
    a, b = generator.random((2, 9, 4)).round(2)
    a = np.minimum(a + 0.1, 1)
    expected = stats.permutation_test(
        ((a - b).sum(axis=1),), lambda x, axis: x.sum(axis=axis), permutation_type="samples",
        n_resamples=np.inf,
    )  # fmt: skip
    texts = np.repeat(np.arange(9), 4).tolist()
    got = statistics.mcnemar(a.ravel().tolist(), b.ravel().tolist(), texts)
    assert got.test == "sign flips of clusters"
    assert got.p_value == pytest.approx(expected.pvalue, abs=1e-12)


def test_pairs_that_share_texts_are_not_independent():
    """Twelve wins and no loss are significant, unless they come from two texts."""
    a, b = [1] * 12, [0] * 12
    assert statistics.mcnemar(a, b).p_value == pytest.approx(2 / 2**12)
    assert statistics.mcnemar(a, b, [0] * 6 + [1] * 6).p_value == pytest.approx(0.5)


def test_each_stratum_counts_the_same():
    """One task on 90 pairs, of which a wins 9, and one on 10, of which it loses 8."""
    a, b = [1] * 9 + [0] * 81 + [0] * 8 + [1] * 2, [0] * 98 + [1] * 2
    b[90:98] = [1] * 8
    tasks = ["large"] * 90 + ["small"] * 10
    pooled, mean = (statistics.mcnemar(a, b, strata=s) for s in (None, tasks))
    assert pooled.difference.estimate == pytest.approx((9 - 8) / 100)
    assert mean.difference.estimate == pytest.approx((9 / 90 - 8 / 10) / 2)
    assert mean.difference.high < 0 < pooled.difference.high
    assert (mean.wins, mean.losses, mean.test) == (9, 8, "sign flips of clusters")
    same = statistics.mcnemar(a[:20], b[:20], strata=["x"] * 10 + ["y"] * 10)
    assert same == statistics.mcnemar(a[:20], b[:20])


def test_stratified_p_value_equals_scipys_permutation_of_weighted_sums():
    generator = np.random.default_rng(6)
    a, b = generator.random((2, 11)).round(2)
    tasks = ["x"] * 8 + ["y"] * 3
    weights = np.array([1 / 8] * 8 + [1 / 3] * 3)
    truth = stats.permutation_test(
        ((a - b) * weights,), lambda x, axis: x.sum(axis=axis), permutation_type="samples",
        n_resamples=np.inf,
    )  # fmt: skip
    got = statistics.mcnemar(a.tolist(), b.tolist(), strata=tasks, resamples=5000)
    assert got.p_value == pytest.approx(truth.pvalue, abs=1e-12)


def test_pairs_with_a_failure_are_counted_and_excluded():
    got = statistics.mcnemar([1, None, 1, 0], [0, 1, None, 0])
    assert (got.difference.n, got.difference.failed) == (2, 2)
    assert (got.wins, got.losses, got.ties) == (1, 0, 1)


@pytest.mark.parametrize(("clusters", "size"), [(50, 1), (10, 1), (10, 5)])
def test_methods_that_agree_everywhere_are_not_proven_equal(clusters, size):
    """With n pairs and no difference seen, up to 3/n of the pairs may differ (rule of three)."""
    texts = np.repeat(np.arange(clusters), size).tolist()
    got = statistics.paired_difference([1] * len(texts), [1] * len(texts), texts)
    assert got.p_value == 1
    assert got.difference.estimate == 0
    assert 2 / clusters < got.difference.half_width * 2 < 12 / clusters
    assert got.difference.low < 0 < got.difference.high


@pytest.mark.parametrize(
    ("clusters", "size", "correlation"), [(50, 1, 0.0), (10, 5, 0.9), (20, 5, 0.3)]
)
def test_paired_intervals_have_their_coverage(clusters, size, correlation):
    generator = np.random.default_rng(8)
    texts = np.repeat(np.arange(clusters), size).tolist()
    chances, covered = [0.1, 0.65, 0.25], 0
    for seed in range(400):
        own = generator.choice([-1, 0, 1], (clusters, size), p=chances)
        shared = generator.choice([-1, 0, 1], (clusters, 1), p=chances)
        copied = generator.random((clusters, size)) < math.sqrt(correlation)
        outcome = np.where(copied, shared, own).ravel()
        a, b = (outcome == 1).astype(float), (outcome == -1).astype(float)
        got = statistics.paired_difference(a.tolist(), b.tolist(), texts, resamples=1000, seed=seed)
        covered += got.difference.low <= 0.15 <= got.difference.high
    assert covered / 400 >= 0.93


def test_paired_p_values_keep_the_error_rate():
    """Without a difference 5% of the p-values are below 0.05; far more if texts are ignored."""
    generator = np.random.default_rng(9)
    texts = np.repeat(np.arange(25), 6).tolist()
    rejected = naively_rejected = 0
    for seed in range(400):
        hits = np.where(
            generator.random((2, 25, 6)) < 0.7,
            generator.random((2, 25, 1)) < 0.6,
            generator.random((2, 25, 6)) < 0.6,
        )
        a, b = hits.reshape(2, -1).astype(float).tolist()
        rejected += statistics.mcnemar(a, b, texts, resamples=500, seed=seed).p_value <= 0.05
        naively_rejected += statistics.mcnemar(a, b, resamples=1).p_value <= 0.05
    assert rejected / 400 <= 0.075
    assert naively_rejected / 400 > 0.15


def test_texts_whose_pairs_agree_count_as_one_pair_each():
    a, b = [1, 1, 1, 0, 1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 1, 1, 0, 1, 1, 0]
    single = statistics.paired_difference(a, b).difference
    texts = np.repeat(np.arange(10), 5).tolist()
    many = statistics.paired_difference(np.repeat(a, 5).tolist(), np.repeat(b, 5).tolist(), texts)
    got = many.difference
    assert (got.low, got.high) == pytest.approx((single.low, single.high))
    assert (got.n, got.effective_n) == (50, 10)


def test_pairing_narrows_the_difference():
    """Both methods miss the same hard samples, so the difference is more certain than a score."""
    generator = np.random.default_rng(6)
    b = (generator.random(200) < 0.6).astype(float)
    a = np.where((b == 0) & (generator.random(200) < 0.2), 1.0, b)
    one, other = statistics.accuracy(a.tolist()), statistics.accuracy(b.tolist())
    assert one.low < other.high  # the intervals overlap
    assert statistics.mcnemar(a.tolist(), b.tolist()).difference.low > 0


@pytest.mark.parametrize("wins", ["++ ++ ++ +- -+ ++ ++", "++ -+ ++ ++ +- ++ ++"])
def test_the_interval_shows_nothing_that_the_test_does_not(wins):
    """Five texts differ, all in one direction; resampled means of all seven exclude zero."""
    pairs = wins.replace(" ", "")
    a = [float(sign == "+") for sign in pairs]
    b = [1 - score for score in a]
    for first, second in ((a, b), (b, a)):
        got = statistics.paired_difference(first, second, [i // 2 for i in range(len(a))])
        assert got.p_value == 2 / 2**5
        assert got.difference.low <= 0 <= got.difference.high


def test_the_seed_decides_the_draws():
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 40)).tolist()
    first = statistics.paired_difference(a, b, seed=1)
    assert first == statistics.paired_difference(a, b, seed=1)
    assert first != statistics.paired_difference(a, b, seed=2)


def test_holm_equals_hand_computed_values():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, and never falling."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1, 1]
    assert statistics.holm([0.03]) == [0.03]
    assert statistics.holm([]) == []
