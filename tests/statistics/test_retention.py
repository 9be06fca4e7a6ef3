"""Test retention and usable length by their definitions and on simulated data."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics
from rope_patch.statistics import Interval


@pytest.mark.parametrize(
    ("a", "m", "b", "n", "chance"),
    [
        *((40, 50, 48, 50, 0), (9, 10, 10, 10, 0), (3, 50, 60, 80, 0)),
        *((a, 50, b, 50, 0.2) for a, b in ((40, 45), (11, 30), (6, 30), (10, 30))),
    ],
)
def test_retention_bounds_satisfy_the_definition_of_mover(a, m, b, n, chance):
    """MOVER from its definition: the R at which the interval of `patched - R base` meets zero.

    Newcombe's interval of a difference x - y has the bound
    `x - y ± sqrt((x - bound of x)² + (y - other bound of y)²)`. Guessing gets a share by chance, at
    and below which a method can be, too.
    """
    patched, base = statistics.wilson(a, m), statistics.wilson(b, n)
    if chance:
        patched, base = (statistics.above_chance(x, chance) for x in (patched, base))
    got = statistics.retention(patched, base)
    assert got.estimate == pytest.approx((a / m - chance) / (b / n - chance))
    assert got.low <= got.estimate <= got.high
    for ratio, bound, upper in ((got.low, patched.low, False), (got.high, patched.high, True)):
        # A ratio below 0 is the farthest from 0 over the smallest base.
        farther = base.low if (ratio >= 0) == upper else base.high
        gap = patched.estimate - ratio * base.estimate
        assert abs(gap) == pytest.approx(
            math.hypot(patched.estimate - bound, ratio * (base.estimate - farther))
        )


def test_guessing_keeps_nothing():
    """A method that guesses keeps none of what the plain model can do beyond guessing."""
    base = statistics.above_chance(statistics.wilson(300, 500), 0.2)
    got = statistics.retention(statistics.above_chance(statistics.wilson(100, 500), 0.2), base)
    assert got.estimate == pytest.approx(0)
    assert got.low < 0 < got.high < 0.15


@pytest.mark.parametrize("counts", [[100], [40, 500, 60], [40] * 6 + [500] * 7])
def test_the_mean_of_tasks_covers_whatever_their_numbers_of_samples(counts):
    generator = np.random.default_rng(4)
    shares = generator.choice([0.0, 0.05, 0.5, 0.95, 1.0], len(counts))
    means = [
        statistics.stratified_mean(
            [
                statistics.wilson(int(generator.binomial(n, p)), n)
                for n, p in zip(counts, shares, strict=True)
            ]
        )
        for _ in range(1000)
    ]
    truth = shares.mean()
    assert np.mean([m.low <= truth <= m.high for m in means]) >= 0.94
    assert np.mean([m.estimate for m in means]) == pytest.approx(truth, abs=0.01)


def test_the_mean_of_tasks_does_not_pool_their_samples():
    """Six of thirteen tasks die; the stopping rule measured them less than the others."""
    plain = [statistics.wilson(250, 500)] * 6 + [statistics.wilson(40, 40)] * 7
    patched = [statistics.wilson(0, 40)] * 6 + [statistics.wilson(40, 40)] * 7
    kept = statistics.retention(*map(statistics.stratified_mean, (patched, plain)))
    assert kept.estimate == pytest.approx((7 / 13) / (10 / 13))
    assert kept.high < 0.85
    mean = statistics.stratified_mean(plain)
    assert mean.n == 6 * 500 + 7 * 40
    assert mean.effective_n < 13 * 13 / (7 / 40)  # no more than the small tasks allow
    assert statistics.stratified_mean(plain[:1]) == plain[0]


def test_retention_has_its_coverage():
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
    undefined = statistics.retention(none, none)
    assert math.isnan(undefined.estimate)
    assert (undefined.low, undefined.high) == (0, math.inf)
    assert statistics.retention(none, some).low == 0
    certain = Interval(0.0, 0.0, 0.0, 5, 5)
    assert statistics.retention(some, certain).high == math.inf


# -- usable length ---------------------------------------------------------------------------------

WHOLE, HALF, FEW, NONE = (50, 50), (25, 50), (5, 5), (3, 50)


def usable(*counts, share=0.85):
    """Return the usable length of `(hits, n)` at 1,024 tokens, 2,048 tokens and so on."""
    kept = {1024 * 2**i: statistics.clopper_pearson(*each) for i, each in enumerate(counts)}
    forwards = statistics.usable_length(kept, share)
    assert statistics.usable_length(dict(reversed(kept.items())), share) == forwards
    return forwards


@pytest.mark.parametrize(
    ("counts", "estimate", "low", "high", "text"),
    [
        ((WHOLE, WHOLE, WHOLE), 4096, 4096, None, "at least 4,096 tokens (the longest measured)"),
        ((WHOLE, WHOLE, HALF), 2048, 2048, 4096, "2,048 tokens (2,048 to 4,096)"),
        ((WHOLE, (8, 8), HALF), 2048, 1024, 4096, "2,048 tokens (1,024 to 4,096)"),
        ((WHOLE, (5, 8), HALF), 1024, 1024, 4096, "1,024 tokens (1,024 to 4,096)"),
        ((WHOLE, FEW, FEW), 4096, 1024, None, "at least 1,024 tokens (2,048 is undecided)"),
        ((NONE, NONE), None, None, 1024, "below 1,024 tokens (the shortest measured)"),
        ((FEW, FEW, NONE), 2048, None, 4096, "not shown (below 4,096)"),
        ((FEW, FEW), 2048, None, None, "not shown"),
        # What comes back beyond a lost length is not usable, nor is what is unsure before it.
        ((WHOLE, NONE, WHOLE), 1024, 1024, 2048, "1,024 tokens (1,024 to 2,048)"),
        ((HALF, WHOLE), None, None, 1024, "below 1,024 tokens (the shortest measured)"),
        ((FEW, NONE, WHOLE), 1024, None, None, "not shown"),
    ],
)
def test_a_usable_length_and_its_interval(counts, estimate, low, high, text):
    got = usable(*counts)
    assert (got.estimate, got.low, got.high) == (estimate, low, high)
    assert str(got) == text
    assert got.is_beyond(512) == (low is not None)
    assert not got.is_beyond(4096)


def test_the_number_of_texts_that_would_do_is_named():
    got = replace(usable(FEW, NONE), texts_needed=23)
    assert (got.undecided, str(got)) == (1024, "not shown (below 2,048; takes 23 texts)")
    assert str(replace(usable(WHOLE, FEW), texts_needed=23)) == (
        "at least 1,024 tokens (2,048 takes 23 texts)"
    )
    assert usable(WHOLE, NONE).undecided is None
    assert usable(WHOLE, FEW, FEW, NONE).undecided == 2048


def test_the_estimate_is_of_the_least_squares_fit_that_never_rises():
    """By the formula of isotonic regression: the least, over starts, of the largest mean."""
    generator = np.random.default_rng(5)
    for _ in range(300):
        count = int(generator.integers(1, 7))
        values = generator.choice([0.6, 0.8, 0.85, 0.9, 1.0], count)
        sizes = generator.integers(1, 60, count)
        wide = {
            1000 * i: Interval(float(value), 0.0, 2.0, int(n), int(n))
            for i, (value, n) in enumerate(zip(values, sizes, strict=True), 1)
        }
        means = {
            (j, k): np.average(values[j : k + 1], weights=sizes[j : k + 1])
            for j in range(count)
            for k in range(j, count)
        }
        fit = [
            min(max(means[j, k] for k in range(i, count)) for j in range(i + 1))
            for i in range(count)
        ]
        expected = [length for length, value in zip(wide, fit, strict=True) if value >= 0.85 - 1e-9]
        got = statistics.usable_length(wide, 0.85)
        assert (got.estimate, got.low, got.high) == (max(expected, default=None), None, None)


def test_an_estimate_lies_in_its_interval():
    generator = np.random.default_rng(6)
    for _ in range(2000):
        sizes = generator.integers(1, 60, int(generator.integers(1, 7)))
        got = usable(*((int(generator.integers(n // 2, n + 1)), int(n)) for n in sizes))
        assert (got.low or 0) <= (got.estimate or 0)
        assert (got.estimate or 0) < (got.high or math.inf)
        assert got.estimate in (None, *got.lengths)


@pytest.mark.parametrize(
    ("bounds", "is_exact"), [(statistics.clopper_pearson, True), (statistics.wilson, False)]
)
def test_each_test_errs_as_often_as_it_may(bounds, is_exact):
    """Summed over all outcomes of 16 texts at both lengths, at 85% of each reference score."""
    n = 16
    of = [bounds(hits, n) for hits in range(n + 1)]
    kept = [[statistics.retention(a, b) if b.low > 0 else None for b in of] for a in of]
    is_low = np.array([[each is not None and each.low >= 0.85 for each in row] for row in kept])
    is_high = np.array([[each is not None and each.high < 0.85 for each in row] for row in kept])
    errors = []
    for score in np.linspace(0.05, 1, 20):
        base, patched = (stats.binom.pmf(range(n + 1), n, p) for p in (score, 0.85 * score))
        errors.append([patched @ is_low @ base, patched @ is_high @ base])
    lower, upper = np.max(errors, axis=0)
    assert (max(lower, upper) <= 0.025) == is_exact
    assert (np.sum(errors, axis=1).max() <= 0.05) == is_exact
    assert max(lower, upper) > 0.01  # not much stricter than promised


@pytest.mark.parametrize("curve", range(1, 8))
def test_the_interval_of_a_usable_length_has_its_coverage(curve, monkeypatch):
    """At 8 to 128 texts, one question a text or four; docs/evaluation.md has more runs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "generate")
    from usable_lengths import CURVES, TEXTS, coverage

    for texts in TEXTS:
        for questions in (1, 4):
            share, _ = coverage(CURVES[curve], texts, questions, runs=200, seed=curve)
            assert share >= 0.94 - 0.01  # within the error of so few runs
