"""Repeated looks: the chance of a false call, over all looks of simulated runs."""

import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


def test_the_levels_of_all_looks_sum_to_the_level():
    for looks in (1, 2, 10, 1000):
        shares = math.fsum(1 / statistics.look_factor(j) for j in range(1, looks + 1))
        assert shares == pytest.approx(1 - 1 / (looks + 1))
    assert statistics.look_factor(0) == 1
    with pytest.raises(ValueError, match="at least 0 looks"):
        statistics.look_factor(-1)


@pytest.mark.parametrize("skewed", [False, True])
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
