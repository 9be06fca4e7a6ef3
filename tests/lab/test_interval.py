"""Test that intervals over samples and seeds hold as often as they say."""

import math

import numpy as np
import pytest

from rope_patch.lab.interval import seeded_difference, seeded_mean


@pytest.mark.parametrize(("seeds", "luck"), [(3, 0.2), (3, 0.0), (1, 0.0)])
def test_intervals_hold_the_truth(seeds, luck):
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        of_samples = random.normal(0, 0.3, 16)
        of_seeds = random.normal(0, luck, (seeds, 1))
        scores = 2.0 + of_seeds + of_samples + random.normal(0, 0.1, (seeds, 16))
        interval = seeded_mean(scores.tolist())
        held += interval.low <= 2.0 <= interval.high
    assert held >= 0.93 * 400


def test_one_half_width_is_that_of_samples_and_seeds_together():
    scores = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    interval = seeded_mean(scores)
    # By hand: Student's t of 3 degrees over samples, of one degree over seeds.
    over_samples = 3.182446 * math.sqrt(5 / 3) / 2
    over_seeds = 12.706205 * math.sqrt(0.5) / math.sqrt(2)
    assert interval.estimate == 3.0
    assert interval.half_width == pytest.approx(math.hypot(over_samples, over_seeds), rel=1e-5)


def test_differences_are_paired():
    first = [[1.0, 5.0, 9.0], [2.0, 6.0, 10.0]]
    second = [[0.5, 4.5, 8.5], [1.5, 5.5, 9.5]]
    difference = seeded_difference(first, second)
    assert (difference.estimate, difference.low, difference.high) == (0.5, 0.5, 0.5)


def test_shares_stay_shares_and_perfect_ones_have_a_width():
    interval = seeded_mean([[1.0] * 20] * 3, is_share=True)
    assert interval.high == 1
    assert 0.8 < interval.low < 0.9


@pytest.mark.parametrize("scores", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_scores_of_different_samples_are_refused(scores):
    with pytest.raises(ValueError, match="the same samples for each seed"):
        seeded_mean(scores)
