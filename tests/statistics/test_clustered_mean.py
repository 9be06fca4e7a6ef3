"""Means over texts and their intervals, against scipy and simulated data."""

import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


def test_a_value_a_text_has_students_t_interval():
    values = np.random.default_rng(1).normal(0.3, 1, 9)
    got = statistics.clustered_mean(values.tolist(), list(range(9)))
    truth = stats.ttest_1samp(values, 0)
    interval = truth.confidence_interval()
    assert (got.mean.low, got.mean.high) == pytest.approx((interval.low, interval.high))
    assert (got.mean.n, got.mean.effective_n) == (9, 9)


def test_equal_texts_have_the_interval_of_their_means():
    values = np.random.default_rng(2).normal(0.5, 1, (6, 5))
    got = statistics.clustered_mean(values.ravel().tolist(), np.repeat(range(6), 5).tolist())
    interval = stats.ttest_1samp(values.mean(axis=1), 0).confidence_interval()
    assert (got.mean.low, got.mean.high) == pytest.approx((interval.low, interval.high))
    assert got.by_text == pytest.approx(values.mean(axis=1))
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


def test_one_text_has_no_interval():
    got = statistics.clustered_mean([1.0, 1.1, 0.9], [0, 0, 0])
    assert (got.mean.low, got.mean.high) == (-math.inf, math.inf)
    assert statistics.texts_to_decide(got) is None


@pytest.mark.parametrize("values", [[], [1.0, math.inf], [math.nan]])
def test_values_must_be_finite(values):
    for function in (statistics.clustered_mean, statistics.mean_test):
        with pytest.raises(ValueError, match=r"expected (finite )?values"):
            function(values, range(len(values)))
