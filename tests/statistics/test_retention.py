"""Test retention and effective length by their definitions and on simulated data."""

import math

import numpy as np
import pytest

from rope_patch import statistics
from rope_patch.statistics import Interval


@pytest.mark.parametrize(("a", "m", "b", "n"), [(40, 50, 48, 50), (9, 10, 10, 10), (3, 50, 60, 80)])
def test_retention_bounds_satisfy_the_definition_of_mover(a, m, b, n):
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


def test_retention_refuses_an_undefined_share():
    with pytest.raises(ValueError, match="at least 0"):
        statistics.retention(Interval(math.nan, 0, 1, 1, 1), statistics.wilson(1, 2))


def lengths(*counts):
    """Return the intervals of `(hits, n)` at 1,024 tokens, 2,048 tokens and so on."""
    return {1024 * 2**i: statistics.wilson(hits, n) for i, (hits, n) in enumerate(counts)}


def test_effective_length_is_the_longest_above_the_threshold():
    assert statistics.effective_length(lengths((50, 50), (50, 50)), 0.85) == (2048, "passes all")


def test_effective_length_stops_at_the_first_that_fails():
    length, reason = statistics.effective_length(lengths((50, 50), (20, 50), (50, 50)), 0.85)
    assert length == 1024
    assert reason.startswith("fails at 2,048 tokens: 40.0%")


def test_effective_length_distinguishes_few_samples_from_failure():
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
