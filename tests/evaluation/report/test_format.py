"""Test numbers as text: an interval has one unit and one notation."""

from __future__ import annotations

import math

import pytest

from rope_patch.evaluation.report.format import (
    change_range,
    change_text,
    nats_range,
    percent_range,
    perplexity_range,
)
from rope_patch.statistics import Interval


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, 10, 10)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.028, 1.005, 1.051), "+2.8% (+0.5 to +5.1%)"),
        ((0.97, 0.9, 1.0), "−3.0% (−10.0 to ±0.0%)"),
        ((1.788, 1.438, 2.224), "+78.8% (+43.8 to +122.4%)"),
        ((1.485, 0.01, 150.0), "×1.5 (×0.01–150)"),
        ((2.15, 1.85, 3.5), "×2.1 (×1.9–3.5)"),
        ((10.0, 8.5, 11.7), "×10 (×8.5–12)"),
    ],
)
def test_a_ratio_and_its_interval_have_one_unit(values, text):
    ratio = interval(*values)
    assert f"{change_text(ratio)} ({change_range(ratio)})" == text


def test_a_column_may_choose_the_unit():
    ratio = interval(1.028, 1.005, 1.051)
    assert change_text(ratio, percent=False, unit=False) == "1.028"
    assert change_range(ratio, percent=False, unit=False) == "1.005–1.051"


def test_an_unknown_interval_is_no_text():
    assert change_range(interval(1.2, 0, math.inf)) == ""
    assert perplexity_range(interval(12.0, 0, math.inf)) == ""
    assert nats_range(interval(0.9, -math.inf, math.inf)) == ""


def test_signs_are_told_apart_from_the_dash_of_an_interval():
    assert percent_range(interval(0.5, 0.34, 0.66)) == "34–66%"
    assert nats_range(interval(0.61, 0.07, 1.15)) == "0.07–1.15"
    assert nats_range(interval(0.55, -0.03, 1.12)) == "−0.03 to 1.12"
