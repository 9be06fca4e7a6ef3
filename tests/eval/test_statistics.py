"""Intervals and tests, against scipy, enumeration, published values and simulated data."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy import stats

from rope_patch.eval import statistics
from rope_patch.eval.statistics import Interval


def clustered_hits(generator, sets, clusters, size, share, correlation):
    """0/1 scores `[sets, clusters * size]` whose clusters have beta-distributed shares."""
    scale = 1 / correlation - 1
    shares = generator.beta(share * scale, (1 - share) * scale, (sets, clusters, 1))
    hits = generator.random((sets, clusters, size)) < shares
    return hits.reshape(sets, -1).astype(float)


# Wilson


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("hits", "n"), [(0, 7), (1, 7), (7, 7), (43, 50), (250, 500)])
def test_wilson_equals_scipy(hits, n, confidence):
    truth = stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
    got = statistics.wilson(hits, n, confidence)
    assert (got.low, got.high) == pytest.approx((truth.low, truth.high), abs=1e-12)
    assert got.estimate == hits / n


@pytest.mark.parametrize(
    ("hits", "n", "percent"),
    [
        (5, 5, (57, 100)),
        (10, 10, (72, 100)),
        (25, 25, (87, 100)),
        (50, 50, (93, 100)),
        (100, 100, (96, 100)),
        (500, 500, (99, 100)),
        (43, 50, (74, 93)),
        (86, 100, (78, 91)),
        (428, 500, (82, 88)),
    ],
)
def test_wilson_equals_published_values(hits, n, percent):
    got = statistics.wilson(hits, n)
    assert (round(100 * got.low), round(100 * got.high)) == percent


def test_wilson_bounds_solve_the_score_equation_for_a_fractional_n():
    n, share = 12.7, 0.31
    got = statistics.wilson(share * n, n)
    for bound in (got.low, got.high):
        assert abs(share - bound) / math.sqrt(bound * (1 - bound) / n) == pytest.approx(1.959964)


def test_wilson_is_exact_at_the_ends():
    assert statistics.wilson(3.7, 3.7).high == 1
    assert statistics.wilson(0, 3.7).low == 0


@pytest.mark.parametrize(("hits", "n"), [(0, 0), (6, 5), (-1, 5), (math.nan, 5)])
def test_wilson_refuses_impossible_counts(hits, n):
    with pytest.raises(ValueError, match="0 <= successes <= n"):
        statistics.wilson(hits, n)


# Accuracy


def test_independent_accuracy_is_wilson():
    scores = [1.0] * 43 + [0.0] * 7
    got, truth = statistics.accuracy(scores), statistics.wilson(43, 50)
    assert (got.low, got.high) == pytest.approx((truth.low, truth.high), abs=1e-12)
    singles = statistics.accuracy(scores, range(50))
    assert (singles.low, singles.high) == pytest.approx((truth.low, truth.high), abs=1e-12)
    assert singles.effective_n == pytest.approx(50)


def test_a_failed_sample_is_no_miss_and_is_counted():
    got = statistics.accuracy([1, None, 0, 1, None, 1], ["a", "a", "a", "b", "b", "b"])
    assert (got.estimate, got.n, got.failed) == (0.75, 4, 2)


def test_texts_that_decide_alone_count_as_one_sample_each():
    scores = np.repeat([1.0] * 14 + [0.0] * 6, 5)
    got = statistics.accuracy(scores.tolist(), np.repeat(np.arange(20), 5).tolist())
    truth = stats.binomtest(14, 20).proportion_ci(method="wilson")
    assert got.effective_n == pytest.approx(20)
    assert (got.low, got.high) == pytest.approx((truth.low, truth.high))


def test_effective_n_is_n_over_the_design_effect():
    """By hand, from the textbook formula of the linearised variance."""
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


def test_unequal_texts_that_agree_count_by_their_squares():
    """Kish: n² over the sum of squared sizes; a text with most samples decides most."""
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
    [(20, 5, 0.8, 0.4), (10, 5, 0.9, 0.3), (5, 10, 0.7, 0.3), (50, 5, 0.95, 0.2)],
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


@pytest.mark.parametrize("scores", [[], [None, None]])
def test_accuracy_of_nothing_is_refused(scores):
    with pytest.raises(ValueError, match="at least one score"):
        statistics.accuracy(scores)


@pytest.mark.parametrize("score", [-0.1, 85.6, math.nan])
def test_accuracy_refuses_scores_on_another_scale(score):
    with pytest.raises(ValueError, match=r"in 0\.\.1"):
        statistics.accuracy([0.5, score])


def test_accuracy_refuses_clusters_of_other_samples():
    with pytest.raises(ValueError, match="cluster for each of 2"):
        statistics.accuracy([0, 1], [1])


# Sample sizes


@pytest.mark.parametrize("precision", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("expected", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_needed_is_the_first_n_that_settles(precision, expected, confidence):
    def holds(n):
        return statistics.settled(statistics.wilson(expected * n, n, confidence), precision)

    got = statistics.needed(precision, confidence, expected)
    assert got == next(n for n in itertools.count(1) if holds(n))


def test_needed_for_half_is_enough_for_any_share():
    n = statistics.needed(0.1)
    assert all(statistics.settled(statistics.wilson(hits, n), 0.1) for hits in range(n + 1))
    assert statistics.needed(0.6) == 1


@pytest.mark.parametrize(("precision", "expected"), [(0, 0.5), (-1, 0.5), (0.1, 85)])
def test_needed_refuses_what_is_no_share(precision, expected):
    with pytest.raises(ValueError, match="as shares"):
        statistics.needed(precision, expected=expected)


def test_an_interval_without_bounds_is_not_settled():
    assert not statistics.settled(Interval(math.nan, math.nan, math.nan, 3, 3), 1)
    assert not statistics.settled(Interval(1, 0, math.inf, 3, 3), 1)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_confidence_is_a_share(confidence):
    with pytest.raises(ValueError, match=r"0\.95"):
        statistics.wilson(1, 2, confidence)


# Retention and effective length


@pytest.mark.parametrize(("a", "m", "b", "n"), [(40, 50, 48, 50), (9, 10, 10, 10), (3, 50, 60, 80)])
def test_retention_is_where_the_difference_against_a_multiple_of_the_base_ends(a, m, b, n):
    """MOVER from its definition: the R at which the interval of `patched - R base` meets zero.

    Newcombe's interval of a difference x - y has the bound
    `x - y ± sqrt((x - bound of x)² + (y - other bound of y)²)`.
    """
    patched, base = statistics.wilson(a, m), statistics.wilson(b, n)
    got = statistics.retention(patched, base)
    assert got.estimate == pytest.approx((a / m) / (b / n))
    assert got.low < got.estimate < got.high
    for ratio, above, below in (
        (got.low, patched.low, base.high),
        (got.high, patched.high, base.low),
    ):
        gap = patched.estimate - ratio * base.estimate
        spread = math.hypot(patched.estimate - above, ratio * (base.estimate - below))
        assert abs(gap) == pytest.approx(spread)


def test_retention_covers():
    generator = np.random.default_rng(2)
    a, b = generator.binomial(50, 0.75, 400), generator.binomial(50, 0.95, 400)
    ratios = [
        statistics.retention(statistics.wilson(x, 50), statistics.wilson(y, 50))
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert np.mean([r.low <= 0.75 / 0.95 <= r.high for r in ratios]) >= 0.93


def test_retention_of_a_base_at_zero_has_no_upper_end():
    some, none = statistics.wilson(20, 25), statistics.wilson(0, 25)
    got = statistics.retention(some, none)
    assert (got.estimate, got.high) == (math.inf, math.inf)
    assert got.low > 1
    both = statistics.retention(none, none)
    assert math.isnan(both.estimate)
    assert (both.low, both.high) == (0, math.inf)
    assert statistics.retention(none, some).low == 0
    certain = Interval(0.0, 0.0, 0.0, 5, 5)
    assert statistics.retention(some, certain).high == math.inf


def test_retention_refuses_what_is_no_share():
    with pytest.raises(ValueError, match="at least 0"):
        statistics.retention(Interval(math.nan, 0, 1, 1, 1), statistics.wilson(1, 2))


def lengths(*counts):
    """Intervals of hits of n at 1024, 2048 and so on."""
    return {1024 * 2**i: statistics.wilson(hits, n) for i, (hits, n) in enumerate(counts)}


def test_effective_length_is_the_longest_that_clears():
    assert statistics.effective_length(lengths((50, 50), (50, 50)), 0.85) == (2048, "passes all")


def test_effective_length_stops_at_the_first_that_fails():
    length, reason = statistics.effective_length(lengths((50, 50), (20, 50), (50, 50)), 0.85)
    assert length == 1024
    assert reason.startswith("fails at 2,048 tokens: 40.0%")


def test_effective_length_tells_few_samples_from_failure():
    length, reason = statistics.effective_length(lengths((50, 50), (5, 5)), 0.85)
    assert length == 1024
    assert reason.startswith("n too small at 2,048 tokens: 100.0%")
    assert "n = 5" in reason


def test_effective_length_may_be_none():
    assert statistics.effective_length(lengths((3, 50)), 0.85)[0] is None
    undefined = {1024: Interval(math.nan, 0, math.inf, 5, 5)}
    length, reason = statistics.effective_length(undefined, 0.85)
    assert length is None
    assert reason.startswith("undefined at 1,024")


def test_effective_length_takes_lengths_in_order_and_needs_one():
    backwards = dict(reversed(lengths((50, 50), (20, 50), (50, 50)).items()))
    assert statistics.effective_length(backwards, 0.85)[0] == 1024
    with pytest.raises(ValueError, match="at least one measured length"):
        statistics.effective_length({}, 0.85)


# Pairs


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
    every = statistics.paired_difference(a, b, resamples=5000)
    drawn = statistics.paired_difference(a, b, resamples=1500)
    assert every.p_value == pytest.approx(exact.p_value, abs=1e-12)
    assert drawn.p_value == pytest.approx(exact.p_value, abs=0.02)
    assert exact.difference == statistics.paired_difference(a, b).difference


def test_clustered_p_value_equals_scipys_permutation_of_the_clusters_sums():
    generator = np.random.default_rng(4)
    a, b = generator.random((2, 9, 4)).round(2)
    a = np.minimum(a + 0.1, 1)
    truth = stats.permutation_test(
        ((a - b).sum(axis=1),), lambda x, axis: x.sum(axis=axis), permutation_type="samples",
        n_resamples=np.inf,
    )  # fmt: skip
    texts = np.repeat(np.arange(9), 4).tolist()
    got = statistics.mcnemar(a.ravel().tolist(), b.ravel().tolist(), texts)
    assert got.test == "sign flips of clusters"
    assert got.p_value == pytest.approx(truth.pvalue, abs=1e-12)


def test_pairs_that_share_texts_are_no_independent_pairs():
    """Twelve wins and no loss are sure, unless they are two texts told six times."""
    a, b = [1] * 12, [0] * 12
    assert statistics.mcnemar(a, b).p_value == pytest.approx(2 / 2**12)
    assert statistics.mcnemar(a, b, [0] * 6 + [1] * 6).p_value == pytest.approx(0.5)


def test_a_pair_with_a_failure_is_left_out_and_counted():
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
def test_paired_intervals_cover(clusters, size, correlation):
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


def test_paired_p_values_are_no_smaller_than_they_should_be():
    """Without a difference one in twenty is below 0.05; McNemar's, blind to texts, far more."""
    generator = np.random.default_rng(9)
    texts = np.repeat(np.arange(25), 6).tolist()
    wrong = naive = 0
    for seed in range(400):
        hits = np.where(
            generator.random((2, 25, 6)) < 0.7,
            generator.random((2, 25, 1)) < 0.6,
            generator.random((2, 25, 6)) < 0.6,
        )
        a, b = hits.reshape(2, -1).astype(float).tolist()
        wrong += statistics.mcnemar(a, b, texts, resamples=500, seed=seed).p_value <= 0.05
        naive += statistics.mcnemar(a, b, resamples=1).p_value <= 0.05
    assert wrong / 400 <= 0.075
    assert naive / 400 > 0.15


def test_texts_whose_pairs_agree_count_as_one_pair_each():
    a, b = [1, 1, 1, 0, 1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 1, 1, 0, 1, 1, 0]
    single = statistics.paired_difference(a, b).difference
    texts = np.repeat(np.arange(10), 5).tolist()
    many = statistics.paired_difference(np.repeat(a, 5).tolist(), np.repeat(b, 5).tolist(), texts)
    got = many.difference
    assert (got.low, got.high) == pytest.approx((single.low, single.high))
    assert (got.n, got.effective_n) == (50, 10)


def test_pairing_is_worth_it():
    """Both methods miss the same hard samples; the difference is surer than either score."""
    generator = np.random.default_rng(6)
    b = (generator.random(200) < 0.6).astype(float)
    a = np.where((b == 0) & (generator.random(200) < 0.2), 1.0, b)
    one, other = statistics.accuracy(a.tolist()), statistics.accuracy(b.tolist())
    assert one.low < other.high  # the intervals overlap
    assert statistics.mcnemar(a.tolist(), b.tolist()).difference.low > 0


def test_the_seed_decides_the_draws():
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 40)).tolist()
    first = statistics.paired_difference(a, b, seed=1)
    assert first == statistics.paired_difference(a, b, seed=1)
    assert first != statistics.paired_difference(a, b, seed=2)


def test_paired_tests_refuse_what_is_no_pair():
    with pytest.raises(ValueError, match="both methods' scores"):
        statistics.mcnemar([1, 0], [1])
    with pytest.raises(ValueError, match="at least one pair"):
        statistics.mcnemar([1, None], [None, 0])


def test_ten_thousand_resamples_of_a_full_table_take_no_time():
    generator = np.random.default_rng(0)
    a, b = (generator.random((2, 650)) < 0.8).astype(float).tolist()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        statistics.mcnemar(a, b, resamples=10_000)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


def test_holm_equals_the_hand_computed():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, and never falling."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1, 1]
    assert statistics.holm([0.03]) == [0.03]
    assert statistics.holm([]) == []


def test_holm_refuses_what_is_no_probability():
    with pytest.raises(ValueError, match=r"0\.\.1"):
        statistics.holm([0.1, math.nan])


# Perplexity


def test_many_documents_are_drawn_whole():
    """Against scipy's percentile bootstrap of the document means, at the moved level."""
    generator = np.random.default_rng(1)
    losses = 2.5 + 0.3 * generator.standard_normal((12, 1)) + generator.random((12, 30))
    got = statistics.bootstrap_mean(losses.tolist(), resamples=20_000)
    level = 2 * stats.norm.cdf(-math.sqrt(12 / 11) * stats.t.ppf(0.975, 11))
    truth = stats.bootstrap(
        (losses.mean(axis=1),), np.mean, confidence_level=1 - level, method="percentile",
        n_resamples=20_000, rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    assert (got.unit, got.n, got.effective_n) == ("documents", 12, 12)
    assert got.estimate == pytest.approx(losses.mean())
    assert (got.low, got.high) == pytest.approx((truth.low, truth.high), abs=0.02)


def test_few_documents_are_drawn_in_runs():
    generator = np.random.default_rng(1)
    losses = generator.random((2, 500))
    got = statistics.bootstrap_mean(losses.tolist(), run=5)
    assert (got.unit, got.n, got.effective_n) == ("blocks", 1000, 200)
    assert got.half_width == pytest.approx(1.96 * losses.std() / math.sqrt(1000), rel=0.15)


def test_every_block_of_a_document_counts_alike():
    """The one bad block may stand in the middle or at the end."""
    middle, end = [1.0] * 40, [1.0] * 40
    middle[20] = end[-1] = 9.0
    one, other = [statistics.bootstrap_mean([losses], run=4) for losses in (middle, end)]
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.01)


def dependent(generator, sets, documents, blocks, between):
    """Losses around 2.5, each block half its neighbour's, documents `between` apart."""
    noise = 0.3 * generator.standard_normal((sets, documents, blocks + 30))
    for i in range(1, noise.shape[-1]):
        noise[..., i] += 0.5 * noise[..., i - 1]
    return 2.5 + noise[..., 30:] + between * generator.standard_normal((sets, documents, 1))


@pytest.mark.parametrize(
    ("documents", "blocks", "between", "unit", "least"),
    [(6, 20, 0.2, "documents", 0.92), (12, 20, 0.2, "documents", 0.92), (1, 600, 0, "blocks", 0.9)],
)
def test_bootstrapped_means_cover(documents, blocks, between, unit, least):
    covered = naive = 0
    for seed, losses in enumerate(
        dependent(np.random.default_rng(3), 400, documents, blocks, between)
    ):
        got = statistics.bootstrap_mean(losses.tolist(), resamples=1000, seed=seed)
        assert got.unit == unit
        covered += got.low <= 2.5 <= got.high
        naive += abs(losses.mean() - 2.5) <= 1.96 * losses.std() / math.sqrt(losses.size)
    assert covered / 400 >= least
    assert naive / 400 < 0.8  # blocks taken as independent


def test_perplexity_is_exp_of_the_weighted_mean():
    losses, tokens = [[2.0, 3.0], [4.0, 5.0, 6.0]], [[63, 64], [63, 64, 64]]
    total = 2 * 63 + 3 * 64 + 4 * 63 + 5 * 64 + 6 * 64
    got = statistics.perplexity_interval(losses, tokens)
    assert got.estimate == pytest.approx(math.exp(total / (63 + 64 + 63 + 64 + 64)))
    assert got.low < got.estimate < got.high
    mean = statistics.bootstrap_mean(losses, tokens)
    assert (got.low, got.high) == pytest.approx((math.exp(mean.low), math.exp(mean.high)))


def test_a_ratio_is_surer_than_either_perplexity():
    losses = dependent(np.random.default_rng(2), 1, 4, 200, 0.3)[0]
    better = losses - 0.02 + 0.01 * np.random.default_rng(5).standard_normal(losses.shape)
    got = statistics.perplexity_ratio(better.tolist(), losses.tolist())
    assert got.estimate == pytest.approx(math.exp((better - losses).mean()))
    assert got.low < math.exp(-0.02) < got.high < 1
    one = statistics.perplexity_interval(better.tolist())
    other = statistics.perplexity_interval(losses.tolist())
    assert one.high > other.low  # taken alone, nothing would be sure
    assert statistics.perplexity_ratio(losses.tolist(), losses.tolist()).half_width == 0


def test_infinite_losses_reach_into_the_interval():
    losses = [[2.0, 3.0, 2.5, 2.2] * 5 for _ in range(6)]
    losses[0][3] = math.inf
    got = statistics.perplexity_interval(losses)
    assert (got.estimate, got.high) == (math.inf, math.inf)
    assert math.exp(2) < got.low < math.exp(3)  # resamples without that document are finite
    fine = [[2.0] * 20 for _ in range(6)]
    assert statistics.perplexity_ratio(losses, fine).high == math.inf
    assert statistics.perplexity_ratio(fine, losses).low == 0
    assert statistics.perplexity_interval(losses[:1]).high == math.inf
    assert statistics.perplexity_interval([[800.0] * 9]).estimate == math.inf


def test_undefined_losses_give_an_undefined_interval():
    for losses in ([[2.0, math.nan, 3.0]], [[2.0, math.nan]] * 7):
        got = statistics.perplexity_interval(losses)
        assert all(map(math.isnan, (got.estimate, got.low, got.high)))
    both = [[1.0, math.inf]]
    assert math.isnan(statistics.perplexity_ratio(both, both).estimate)


def test_one_block_has_no_bounds():
    got = statistics.perplexity_interval([[2.0], []])
    assert got.estimate == pytest.approx(math.exp(2))
    assert (got.low, got.high) == (0, math.inf)


def test_perplexity_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one block"):
        statistics.perplexity_interval([[], []])
    with pytest.raises(ValueError, match="weight above 0"):
        statistics.perplexity_interval([[1.0, 2.0]], [[64]])
    with pytest.raises(ValueError, match="weight above 0"):
        statistics.perplexity_interval([[1.0, 2.0]], [[0, 64]])
    with pytest.raises(ValueError, match="same blocks"):
        statistics.perplexity_ratio([[1.0, 2.0]], [[1.0]])
