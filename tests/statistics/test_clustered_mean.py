"""Means over texts and their tests, against scipy and simulated data."""

import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


def test_a_value_a_text_is_students_t_test():
    values = np.random.default_rng(1).normal(0.3, 1, 9)
    got = statistics.clustered_mean(values.tolist(), list(range(9)))
    truth = stats.ttest_1samp(values, 0)
    assert got.p_value == pytest.approx(truth.pvalue)
    interval = truth.confidence_interval()
    assert (got.mean.low, got.mean.high) == pytest.approx((interval.low, interval.high))
    assert (got.mean.n, got.mean.effective_n) == (9, 9)


def test_equal_texts_are_students_t_test_of_their_means():
    values = np.random.default_rng(2).normal(0.5, 1, (6, 5))
    got = statistics.clustered_mean(values.ravel().tolist(), np.repeat(range(6), 5).tolist())
    truth = stats.ttest_1samp(values.mean(axis=1), 0)
    assert got.p_value == pytest.approx(truth.pvalue)
    assert (got.mean.n, got.mean.effective_n) == (30, 6)


@pytest.mark.parametrize(("texts", "size", "least"), [(2, 5, 0.93), (4, 5, 0.93), (10, 5, 0.93)])
def test_intervals_cover_where_samples_of_a_text_agree(texts, size, least):
    generator = np.random.default_rng(3)
    covered = naive = 0
    for _ in range(1000):
        values = generator.normal(0, 1, (texts, 1)) + 0.3 * generator.normal(0, 1, (texts, size))
        clusters = np.repeat(range(texts), size).tolist()
        got = statistics.clustered_mean((1 + values).ravel().tolist(), clusters).mean
        covered += got.low <= 1 <= got.high
        low, high = stats.ttest_1samp(1 + values.ravel(), 0).confidence_interval()
        naive += low <= 1 <= high
    assert covered / 1000 >= least
    assert naive / 1000 < 0.75


def test_each_stratum_counts_the_same():
    values, tasks = [1.0] * 90 + [-1.0] * 10, ["large"] * 90 + ["small"] * 10
    assert statistics.clustered_mean(values, range(100)).mean.estimate == pytest.approx(0.8)
    assert statistics.clustered_mean(values, range(100), tasks).mean.estimate == pytest.approx(0)


def test_one_text_decides_nothing():
    got = statistics.clustered_mean([1.0, 1.1, 0.9], [0, 0, 0])
    assert (got.mean.low, got.mean.high, got.p_value) == (-math.inf, math.inf, 1.0)
    assert statistics.texts_to_decide(got) is None


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_number_of_texts_to_decide_decides_four_times_in_five(level):
    """With the measured mean and deviation, by scipy's noncentral t distribution."""
    values = [0.5, -0.4, 0.9, 0.2]
    test = statistics.clustered_mean(values, range(4))
    assert test.deviation == pytest.approx(np.std(values, ddof=1))
    count = statistics.texts_to_decide(test, level)
    for texts, decides in ((count, True), (count - 1, False)):
        noncentrality = np.mean(values) / test.deviation * math.sqrt(texts)
        critical = stats.t.ppf(1 - level / 2, texts - 1)
        assert (stats.nct.sf(critical, texts - 1, noncentrality) >= 0.8) == decides
    assert statistics.texts_to_decide(statistics.clustered_mean([1.0, -1.0], range(2))) is None
    assert statistics.texts_to_decide(statistics.clustered_mean([1.0, 1.0], range(2))) == 2


@pytest.mark.parametrize("values", [[], [1.0, math.inf], [math.nan]])
def test_values_must_be_finite(values):
    with pytest.raises(ValueError, match=r"expected (finite )?values"):
        statistics.clustered_mean(values, range(len(values)))


@pytest.mark.parametrize(("first", "second"), [(2, 4), (8, 4), (3, 12)])
def test_means_of_other_texts_are_compared_by_welch_s_test(first, second):
    generator = np.random.default_rng(first)
    values = [generator.normal(0, 0.3, first), generator.normal(1, 0.9, second)]
    means = [statistics.clustered_mean(v.tolist(), range(len(v))) for v in values]
    truth = stats.ttest_ind(*values, equal_var=False)
    assert statistics.welch_p(*means) == pytest.approx(truth.pvalue)


def test_one_text_is_compared_with_nothing():
    one, many = (statistics.clustered_mean([1.0] * n, range(n)) for n in (1, 3))
    assert statistics.welch_p(one, many) == 1
    assert statistics.welch_p(many, many) == 1
    assert statistics.welch_p(many, statistics.clustered_mean([2.0] * 3, range(3))) == 0
