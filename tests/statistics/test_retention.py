"""Test retention and effective length by their definitions and on simulated data."""

import math

import numpy as np
import pytest

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


WHOLE, DEAD, FEW, NONE = (50, 50), (20, 50), (5, 5), (3, 50)


@pytest.mark.parametrize(
    ("counts", "length", "reason"),
    [
        ((WHOLE, WHOLE), 2048, "passes all"),
        ((NONE,), None, "fails at 1,024 tokens: 6.0%"),
    ],
)
def test_effective_length_is_the_longest_above_the_threshold(counts, length, reason):
    got = effective_length(*counts)
    assert got[0] == length
    assert got[1].startswith(reason)


def effective_length(*counts):
    """Return it of `(hits, n)` at 1,024 tokens, 2,048 tokens and so on."""
    shares = {1024 * 2**i: statistics.wilson(hits, n) for i, (hits, n) in enumerate(counts)}
    forwards = statistics.effective_length(shares, 0.85)
    assert statistics.effective_length(dict(reversed(shares.items())), 0.85) == forwards
    return forwards


def test_effective_length_stops_at_the_first_that_fails():
    length, reason = effective_length(WHOLE, DEAD, WHOLE)
    assert length == 1024
    assert reason.startswith("fails at 2,048 tokens: 40.0%")


def test_effective_length_distinguishes_few_samples_from_failure():
    length, reason = effective_length(WHOLE, FEW)
    assert length == 1024
    assert reason.startswith("n too small at 2,048 tokens: 100.0%")
    assert "n = 5" in reason
    undefined = {1024: Interval(math.nan, 0, math.inf, 5, 5)}
    length, reason = statistics.effective_length(undefined, 0.85)
    assert length is None
    assert reason.startswith("undefined at 1,024")
