"""The power of the rule for texts, against scipy's noncentral t and simulated runs."""

import math

import numpy as np
import pytest
from scipy import stats

from rope_patch import statistics


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


@pytest.mark.parametrize(
    "arguments", [{"level": 0.0}, {"level": 1.0}, {"power": 0.5}, {"power": 1.0}, {"deviation": 0}]
)
def test_what_is_out_of_range_is_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        statistics.smallest_effect(**{"texts": 4, "deviation": 1.0, **arguments})
    with pytest.raises(ValueError, match="expected an effect above 0, got -1"):
        statistics.required_texts(-1, 1.0)
