"""Test that numbers are printed as far as their intervals reach, and no farther."""

import pytest

from rope_patch.lab.report.numbers import (
    difference_range,
    difference_text,
    loss_cell,
    share_cell,
)
from rope_patch.statistics import Interval


def interval(low, estimate, high):
    return Interval(estimate, low, high, 48, 16)


def test_a_loss_that_is_not_known_is_called_unclear():
    assert loss_cell(interval(1.70, 1.75, 1.80)).text == "1.75"
    assert loss_cell(interval(1.20, 1.75, 2.30)).text == "unclear"
    assert loss_cell(interval(-float("inf"), 1.75, float("inf"))).text == "unclear"
    assert loss_cell(None, missing="no rows").text == "no rows"


@pytest.mark.parametrize(
    ("low", "estimate", "high", "text"),
    [
        (0.3, 0.4, 0.5, "40%"),
        (0.2, 0.3, 0.4, "maybe chance"),
        (0.1, 0.2, 0.3, "chance or less"),
        (0.0, 0.1, 0.2, "chance or less"),
    ],
)
def test_recall_that_a_guess_may_reach_is_called_chance(low, estimate, high, text):
    cell = share_cell(interval(low, estimate, high))
    assert cell.text == text
    assert "48" in cell.tip


def test_differences_have_signs_but_for_zero():
    assert difference_text(-0.001, is_share=False) == "0.00 nats"
    assert difference_text(0.126, is_share=False) == "+0.13 nats"
    assert difference_text(-0.126, is_share=True) == "−13 points"
    assert difference_range(interval(-0.5, 0, 0.25), is_share=False) == "−0.50 to +0.25"
