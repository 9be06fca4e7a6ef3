"""Test what verdicts say, and that they agree with their tests."""

import numpy as np
import pytest

from rope_patch.statistics import SIGNIFICANCE_LEVEL, Outcome, Verdict, holm, mean_test

SPREAD = [0.9, 1.1, 1.0, 1.2, 0.8, 1.05, 0.95, 1.15]


def verdict(differences, comparisons=1):
    """Return the verdict of the smallest p of several comparisons."""
    test = mean_test(differences, range(len(differences)))
    p = min(1.0, comparisons * test.p_value)
    return Verdict(test, p, SIGNIFICANCE_LEVEL / comparisons)


@pytest.mark.parametrize(
    ("differences", "comparisons", "outcome"),
    [
        ([-x for x in SPREAD], 1, Outcome.BETTER),
        (SPREAD, 1, Outcome.WORSE),
        ([0.0] * 8, 1, Outcome.EQUAL),
        ([0.0] * 5, 1, Outcome.TOO_FEW_TEXTS),  # no interval
        (SPREAD[:5], 1, Outcome.TOO_FEW_TEXTS),
        (SPREAD[:6], 1, Outcome.WORSE),
        (SPREAD[:6], 2, Outcome.TOO_FEW_TEXTS),  # 2 × 2 / 2**6 is above the level
        (SPREAD, 10, Outcome.TOO_FEW_TEXTS),
        ([1.0, -1.0] * 4, 1, Outcome.NOT_TOLD_APART),
    ],
)
def test_each_outcome(differences, comparisons, outcome):
    assert verdict(differences, comparisons).outcome is outcome


def test_what_is_shown_rests_on_enough_texts():
    """So a verdict never says both that a method is better and that the texts are too few."""
    generator = np.random.default_rng(0)
    shown = 0
    for _ in range(300):
        texts, methods = generator.integers(2, 12), generator.integers(1, 5)
        tests = [
            mean_test(generator.normal(generator.choice([0, 3]), 1, texts).tolist(), range(texts))
            for _ in range(methods)
        ]
        adjusted = holm([test.p_value for test in tests])
        level = SIGNIFICANCE_LEVEL / methods
        for test, p in zip(tests, adjusted, strict=True):
            decided = Verdict(test, p, level)
            shown += decided.is_shown
            assert not decided.is_shown or texts >= decided.least_texts
    assert shown > 50


def test_the_texts_needed_are_more_than_there_are():
    undecided = verdict([0.5, -0.3, 0.6, 0.2, -0.4, 0.5, 0.1, 0.3])
    assert undecided.outcome is Outcome.NOT_TOLD_APART
    assert undecided.texts_needed > 8
    assert verdict(SPREAD).texts_needed is None
    assert verdict([0.0] * 8).texts_needed is None
