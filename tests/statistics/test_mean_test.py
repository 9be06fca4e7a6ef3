"""The rule by which a difference is shown, its power and looks: against scipy and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics
from rope_patch.statistics import hall_p_values, sign_flip_p, sign_flip_test


def run_of(texts: int, seed: int, *, is_stratified: bool, mean: float = 0.8):
    """Return values, texts and strata of a run, with one to three values a text."""
    generator = np.random.default_rng([texts, seed])
    clusters = np.repeat(range(texts), generator.integers(1, 4, texts)).tolist()
    values = generator.normal(mean, 1, len(clusters)).round(2).tolist()
    strata = generator.integers(2, size=len(clusters)).tolist() if is_stratified else None
    return values, clusters, strata


def stratified_mean(values, strata) -> float:
    groups = [0] * len(values) if strata is None else strata
    means = [
        np.mean([v for v, g in zip(values, groups, strict=True) if g == group])
        for group in sorted(set(groups))
    ]
    return float(np.mean(means))


def enumerated_p(values, clusters, strata) -> float:
    """Return the share of the texts' signs whose stratified mean is as far from zero."""
    observed = abs(stratified_mean(values, strata))
    far = []
    for signs in itertools.product((1, -1), repeat=len(set(clusters))):
        flipped = [signs[text] * value for value, text in zip(values, clusters, strict=True)]
        far.append(abs(stratified_mean(flipped, strata)) >= observed - 1e-9)
    return float(np.mean(far))


@pytest.mark.parametrize("is_stratified", [False, True])
@pytest.mark.parametrize("texts", [1, 2, 5, 6, 9])
def test_p_is_the_larger_of_enumerated_signs_and_halls_t(texts, is_stratified):
    for seed in range(4):
        values, clusters, strata = run_of(texts, seed, is_stratified=is_stratified)
        got = statistics.mean_test(values, clusters, strata)
        assert got.mean.estimate == pytest.approx(stratified_mean(values, strata))
        hall = hall_p_values(np.array(got.by_text)[None])[0] if texts > 1 else 0
        expected = max(enumerated_p(values, clusters, strata), hall)
        assert got.p_value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "confidence", [0.95, pytest.param(0.975, marks=pytest.mark.slow), 1 - 0.05 / 6]
)
@pytest.mark.parametrize("is_stratified", [False, True])
def test_zero_is_outside_the_interval_where_p_is_below_the_level_and_only_there(
    is_stratified, confidence
):
    shown = 0
    for texts, seed in itertools.product(range(2, 13), range(8)):
        values, clusters, strata = run_of(texts, seed, is_stratified=is_stratified)
        got = statistics.mean_test(values, clusters, strata, confidence)
        excludes_zero = got.mean.low > 0 or got.mean.high < 0
        assert excludes_zero == (got.p_value < 1 - confidence)
        assert got.mean.low <= got.mean.estimate <= got.mean.high
        shown += excludes_zero
    assert 8 < shown < 80


@pytest.mark.parametrize("texts", [6, 9, 20])
def test_bounds_are_the_first_means_that_are_not_rejected(texts):
    """A little beyond either bound a mean is rejected, a little within it is not."""
    for seed in range(3):
        values, clusters, strata = run_of(texts, seed, is_stratified=True)
        mean = statistics.mean_test(values, clusters, strata).mean

        def p_of(bound, run=(values, clusters, strata)):
            moved = [value - bound for value in run[0]]
            return statistics.mean_test(moved, *run[1:]).p_value

        for bound, out in ((mean.low, -1), (mean.high, 1)):
            assert p_of(bound + 1e-6 * out) < 0.05
            assert p_of(bound - 1e-6 * out) >= 0.05


def test_arrays_are_tested_as_lists_are():
    values, texts = [1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 7.0], list(range(7))
    of_arrays = statistics.mean_test(np.array(values), np.array(texts))
    assert of_arrays == statistics.mean_test(values, texts)


def test_single_values_are_scipys_permutation_test():
    values = np.random.default_rng(3).normal(0.5, 1, 11)
    truth = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert sign_flip_p(values) == pytest.approx(truth.pvalue)


def test_more_texts_than_can_be_enumerated_are_sampled_and_never_certain():
    values = np.random.default_rng(4).normal(0.3, 1, 40)
    p, low, high = sign_flip_test(values, np.ones(40), 0.95)
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    interval = stats.ttest_1samp(values, 0).confidence_interval()
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=0.03)
    assert 0 < sign_flip_p(np.ones(40)) < 1e-4
    assert 0 < sign_flip_p(np.ones(3000)) < 1e-3


def test_halls_t_is_the_papers():
    """Hall (1992), with the skewness of the sample: s + g s²/3 + g² s³/27 + g/6n, times root n."""
    values = np.random.default_rng(5).normal(size=(50, 9)) ** 2 - 0.9
    n, s = 9, values.mean(axis=1) / values.std(axis=1, ddof=1)
    g = stats.skew(values, axis=1)
    statistic = math.sqrt(n) * (s + g * s**2 / 3 + g**2 * s**3 / 27 + g / (6 * n))
    one_sided = np.where(s > 0, stats.t.sf(statistic, n - 1), stats.t.cdf(statistic, n - 1))
    is_cubic = -s * g < 1.5
    assert is_cubic.sum() > 25
    expected = np.minimum(1, 2 * one_sided)
    assert hall_p_values(values)[is_cubic] == pytest.approx(expected[is_cubic])
    assert hall_p_values(np.array([[1.0, -1.0, 2.0, -2.0]])) == pytest.approx([1.0])


def test_one_small_gain_among_large_ones_is_no_doubt_of_them():
    """Hall's cubic alone is flat where t is three over the skewness: p could not fall below .1."""
    gains = np.array([2.77, 2.54, 1.61, 2.97, 0.02, 2.97, 2.26, 2.41])
    p_values = [hall_p_values((gains + more)[None])[0] for more in (0, 1, 2, 4, 8)]
    assert p_values == sorted(p_values, reverse=True)
    assert p_values[0] == pytest.approx(0.045, abs=0.005)
    assert p_values[-1] < 0.001


@pytest.mark.parametrize(("level", "texts"), [(0.05, 6), (0.025, 7), (0.0125, 8), (0.05 / 7, 9)])
def test_the_least_texts_are_the_fewest_that_show_equal_gains(level, texts):
    assert statistics.least_texts(level) == texts
    for count, is_shown in ((texts, True), (texts - 1, False)):
        assert (statistics.mean_test([1.0] * count, range(count)).p_value < level) == is_shown


@pytest.mark.parametrize("texts", [1, 2, 3, 4, 5])
def test_nothing_is_shown_below_six_texts(texts):
    """However many values each has, and however large and equal the differences are."""
    values, clusters = [-9.0] * 20 * texts, np.repeat(range(texts), 20).tolist()
    got = statistics.mean_test(values, clusters)
    assert got.p_value >= 0.05
    assert (got.mean.low, got.mean.high) == (-math.inf, math.inf)
    paired = statistics.paired_difference([1] * 20 * texts, [0] * 20 * texts, clusters)
    assert paired.p_value >= 0.05
    assert paired.difference.low <= 0


def lognormal(generator, count):
    return np.exp(generator.normal(size=count)) - math.exp(0.5)


def normal(generator, count):
    return generator.normal(size=count)


@pytest.mark.parametrize(
    ("design", "draw", "most"),
    [
        ("equal", normal, 0.03),
        pytest.param("equal", lognormal, 0.12, marks=pytest.mark.slow),
        ("unequal strata", normal, 0.03),
        pytest.param("unequal strata", lognormal, 0.12, marks=pytest.mark.slow),
        ("looks", normal, 0.03),
        pytest.param("looks", lognormal, 0.12, marks=pytest.mark.slow),
    ],
)
def test_false_verdicts_of_simulated_runs(design, draw, most):
    """At most .03 on either side for normal differences; docs/evaluation.md has the skewed ones."""
    generator, runs, sides = np.random.default_rng(7), 500, [0, 0]
    for _ in range(runs):
        tests = []
        if design == "unequal strata":
            values = draw(generator, 35).tolist()
            clusters = [i // 5 for i in range(15)] + list(range(3, 23))
            strata = ["few"] * 15 + ["many"] * 20
            tests.append((statistics.mean_test(values, clusters, strata), 1))
        else:
            looks = 3 if design == "looks" else 1
            values = draw(generator, 8 * 2 ** (looks - 1)).tolist()
            for look in range(1, looks + 1):
                count = 8 * 2 ** (look - 1)
                factor = statistics.look_factor(look if looks > 1 else 0)
                tests.append((statistics.mean_test(values[:count], range(count)), factor))
        shown = [test for test, factor in tests if test.p_value * factor < 0.05]
        if shown:
            sides[shown[0].mean.estimate > 0] += 1
    assert max(sides) / runs <= most + 0.015  # two standard errors of .03


@pytest.mark.parametrize(("first", "second"), [(2, 4), (8, 4), (3, 12)])
def test_means_of_other_texts_are_compared_by_welch_s_and_a_permutation_test(first, second):
    generator = np.random.default_rng(first)
    values = [generator.normal(0, 0.3, first), generator.normal(1, 0.9, second)]
    means = [statistics.clustered_mean(v.tolist(), range(len(v))) for v in values]
    gaps = []
    for chosen in itertools.combinations(range(first + second), first):
        pooled = np.concatenate(values)
        gaps.append(abs(pooled[list(chosen)].mean() - np.delete(pooled, chosen).mean()))
    permuted = np.mean(np.array(gaps) >= abs(values[0].mean() - values[1].mean()) - 1e-12)
    welch = stats.ttest_ind(*values, equal_var=False).pvalue
    assert statistics.two_means_p(*means) == pytest.approx(max(welch, permuted))


def test_one_text_is_compared_with_nothing():
    one, many = (statistics.clustered_mean([1.0] * n, range(n)) for n in (1, 3))
    assert statistics.two_means_p(one, many) == 1
    assert statistics.two_means_p(many, many) == 1
    other = statistics.clustered_mean([2.0] * 3, range(3))
    assert statistics.two_means_p(many, other) == pytest.approx(2 / 20)
    more = [statistics.clustered_mean([x] * 20, range(20)) for x in (1.0, 2.0)]
    assert 0 < statistics.two_means_p(*more) < 0.001


# -- means and their intervals ---------------------------------------------------------------------


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


@pytest.mark.parametrize("texts", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_intervals_cover_where_samples_of_a_text_agree(texts):
    size, generator = 5, np.random.default_rng(3)
    covered = naive = 0
    for _ in range(500):
        values = generator.normal(0, 1, (texts, 1)) + 0.3 * generator.normal(0, 1, (texts, size))
        clusters = np.repeat(range(texts), size).tolist()
        got = statistics.clustered_mean((1 + values).ravel().tolist(), clusters).mean
        covered += got.low <= 1 <= got.high
        low, high = stats.ttest_1samp(1 + values.ravel(), 0).confidence_interval()
        naive += low <= 1 <= high
    assert covered / 500 >= 0.93
    assert naive / 500 < 0.75


def test_each_stratum_of_a_mean_counts_the_same():
    values, tasks = [1.0] * 90 + [-1.0] * 10, ["large"] * 90 + ["small"] * 10
    assert statistics.clustered_mean(values, range(100)).mean.estimate == pytest.approx(0.8)
    assert statistics.clustered_mean(values, range(100), tasks).mean.estimate == pytest.approx(0)


def test_one_text_has_no_interval():
    got = statistics.clustered_mean([1.0, 1.1, 0.9], [0, 0, 0])
    assert (got.mean.low, got.mean.high) == (-math.inf, math.inf)
    assert statistics.texts_to_decide(got) is None


# -- power -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [60, 100, 1000])
@pytest.mark.parametrize("level", [0.05, 0.0125, 0.001])
def test_many_texts_have_the_power_of_the_t_test(texts, level):
    """Of the noncentral t distribution, computed by another library (Boost)."""
    effect = statistics.smallest_effect(texts, 0.7, level)
    critical = stats.t.ppf(1 - level / 2, texts - 1)
    noncentrality = effect / 0.7 * math.sqrt(texts)
    assert stats.nct.sf(critical, texts - 1, noncentrality) == pytest.approx(0.8, abs=2e-3)


@pytest.mark.parametrize(("texts", "level"), [(6, 0.05), (8, 0.05 / 4), (14, 0.05), (40, 0.05)])
def test_four_of_five_simulated_runs_show_the_smallest_effect(texts, level):
    effect = statistics.smallest_effect(texts, 0.9, level)
    generator, runs = np.random.default_rng(1), 400
    shown = 0
    for values in generator.normal(effect, 0.9, (runs, texts)):
        shown += statistics.mean_test(values.tolist(), range(texts)).p_value < level
    assert shown / runs == pytest.approx(0.8, abs=0.06)  # three standard deviations


@pytest.mark.parametrize("effect", [0.05, 0.5, 1.0, 3.0])
def test_required_texts_are_just_enough(effect):
    texts = statistics.required_texts(effect, 0.9, 0.0125)
    assert statistics.smallest_effect(texts, 0.9, 0.0125) <= effect * 1.001
    assert statistics.smallest_effect(texts - 1, 0.9, 0.0125) > effect


def test_too_few_texts_show_nothing():
    assert statistics.smallest_effect(5, 0.1) == math.inf
    assert statistics.smallest_effect(7, 0.1, 0.0125) == math.inf
    assert statistics.required_texts(1e9, 1.0) == 6
    assert statistics.required_texts(1e-3, 1.0) is None


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_texts_to_decide_have_the_measured_mean_and_deviation(level):
    values = [0.5, -0.4, 0.9, 0.2]
    measured = statistics.clustered_mean(values, range(4))
    assert measured.deviation == pytest.approx(np.std(values, ddof=1))
    expected = statistics.required_texts(np.mean(values), np.std(values, ddof=1), level)
    assert statistics.texts_to_decide(measured, level) == expected
    assert statistics.texts_to_decide(statistics.clustered_mean([1.0], [0])) is None
    assert statistics.texts_to_decide(statistics.clustered_mean([1.0, -1.0], range(2))) is None
    assert statistics.texts_to_decide(statistics.clustered_mean([1.0, 1.0], range(2))) == 6


# -- looks -----------------------------------------------------------------------------------------


def test_the_levels_of_all_looks_sum_to_the_level():
    for looks in (1, 2, 10, 1000):
        shares = math.fsum(1 / statistics.look_factor(j) for j in range(1, looks + 1))
        assert shares == pytest.approx(1 - 1 / (looks + 1))
    assert statistics.look_factor(0) == 1


@pytest.mark.parametrize("skewed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_looks_until_significant_keep_the_error_rate(skewed):
    """Four methods without an effect, doubled from 3 texts to 96: one is called 5 times of 100."""
    generator = np.random.default_rng(4)
    runs, methods = 4000, 4
    shape = (runs, methods, 96)
    # Differences are of the same texts, hence correlated between methods.
    shared = generator.normal(size=(runs, 1, 96))
    values = generator.normal(size=shape) + shared
    if skewed:
        values = generator.exponential(size=shape) - 1 + shared
    false_calls = np.zeros(runs, dtype=bool)
    uncorrected = np.zeros(runs, dtype=bool)
    for look, texts in enumerate((3, 6, 12, 24, 48, 96), start=1):
        p = stats.ttest_1samp(values[..., :texts], 0, axis=-1).pvalue.min(axis=1) * methods
        false_calls |= p * statistics.look_factor(look) < 0.05
        uncorrected |= p < 0.05
    assert false_calls.mean() <= 0.05
    assert uncorrected.mean() > 0.07
