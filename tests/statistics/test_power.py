"""The power of a t test over texts, against scipy's noncentral t and simulated runs."""

import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


@pytest.mark.parametrize("texts", [2, 3, 6, 12, 100, 1000])
@pytest.mark.parametrize("level", [0.05, 0.0125, 0.001])
def test_the_smallest_effect_has_the_power(texts, level):
    """Of the noncentral t distribution, computed by another library (Boost)."""
    effect = statistics.smallest_effect(texts, 0.7, level)
    critical = stats.t.ppf(1 - level / 2, texts - 1)
    noncentrality = effect / 0.7 * math.sqrt(texts)
    assert stats.nct.sf(critical, texts - 1, noncentrality) == pytest.approx(0.8, abs=1e-4)


def test_four_of_five_simulated_runs_show_the_smallest_effect():
    effect = statistics.smallest_effect(6, 0.9, 0.05 / 4)
    generator = np.random.default_rng(1)
    p = stats.ttest_1samp(generator.normal(effect, 0.9, (20_000, 6)), 0, axis=1).pvalue
    assert (p < 0.05 / 4).mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("effect", [0.05, 0.5, 1.0, 3.0])
def test_required_texts_are_just_enough(effect):
    texts = statistics.required_texts(effect, 0.9, 0.0125)
    assert statistics.smallest_effect(texts, 0.9, 0.0125) <= effect
    assert statistics.smallest_effect(texts - 1, 0.9, 0.0125) > effect


def test_one_text_shows_nothing():
    assert statistics.smallest_effect(1, 0.1) == math.inf
    assert statistics.required_texts(1e9, 1.0) == 2
    assert statistics.required_texts(1e-3, 1.0) is None


@pytest.mark.parametrize(
    "arguments", [{"level": 0.0}, {"level": 1.0}, {"power": 0.5}, {"power": 1.0}, {"deviation": 0}]
)
def test_what_is_out_of_range_is_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        statistics.smallest_effect(**{"texts": 4, "deviation": 1.0, **arguments})
    with pytest.raises(ValueError, match="expected an effect above 0, got -1"):
        statistics.required_texts(-1, 1.0)
