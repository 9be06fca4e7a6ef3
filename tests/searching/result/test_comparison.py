"""The held-out comparison of a search's result: which differences it shows."""

import math

import pytest

from rope_patch import statistics
from rope_patch.inference.samples import Sample
from rope_patch.searching.measure.fitness import Evaluation
from rope_patch.searching.result.comparison import FOUND, compare


def evaluation(nll, is_right, fitness):
    hits = tuple((is_right,) for _ in nll)
    return Evaluation(tuple(nll), hits, fitness, tokens=1, seconds=1.0, complete=True)


@pytest.mark.parametrize(("texts", "is_shown"), [(5, False), (6, True)])
def test_nothing_is_shown_below_six_texts(texts, is_shown):
    samples = [Sample((1, 2, 3), ((1, 2),), group=str(i)) for i in range(texts)]
    losses = {FOUND: evaluation([0.1] * texts, True, 0.1)}
    losses["yarn"] = evaluation([9.0 + i for i in range(texts)], False, 11.0)
    difference = compare(losses, samples)["against yarn"]
    low, high = difference["interval"]
    assert low < difference["nll"] < high
    assert (high < 0) == is_shown
    assert math.isinf(high) != is_shown
    assert (difference["p"] < 0.05) == is_shown


def test_answers_and_prose_weigh_the_same_in_the_interval():
    """The mean of the two kinds' means, tested over the texts of both."""
    kinds = [False] * 9 + [True] * 3
    samples = [Sample((1, 2, 3), ((1, 2),), str(i), kind) for i, kind in enumerate(kinds)]
    differences = [0.5 + 0.1 * i for i in range(9)] + [-0.2, -0.1, 0.4]
    losses = {FOUND: evaluation([2.0 + d for d in differences], True, 2.5)}
    losses["yarn"] = evaluation([2.0] * 12, True, 2.0)
    expected = statistics.mean_test(differences, range(12), kinds).mean
    assert expected.estimate == pytest.approx((0.9 + 0.1 / 3) / 2)
    interval = compare(losses, samples)["against yarn"]["interval"]
    assert interval == pytest.approx([expected.low, expected.high])
