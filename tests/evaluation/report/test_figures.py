"""Figures and numbers: a question each, few colours, labels that fit, one unit for an interval."""

import math
import random
import re

import pytest
from helpers.report_results import many, results

pytest.importorskip("matplotlib")

from rope_patch import evaluation
from rope_patch.evaluation import (
    Ranking,
    RunStatistics,
    change_range,
    change_text,
    depth_maps,
    draw_figures,
    draw_heat_maps,
    log_ticks,
)
from rope_patch.statistics import Interval

# -- figures ---------------------------------------------------------------------------------------


def ranked(measured):
    stats = RunStatistics(measured)
    return stats, Ranking(stats)


@pytest.fixture(scope="module")
def of_many():
    return {name: picture.svgs for name, picture in draw_figures(*ranked(many())).items()}


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_each_figure_asks_a_question_and_has_few_labels(of_many, width):
    questions = [" ".join(texts(svgs[width])) for svgs in of_many.values()]
    assert {"answers", "perplexity", "stretch"} <= of_many.keys()
    assert all("?" in text for text in questions)
    labels = [text.strip() for text in texts(of_many["perplexity"][width])]
    methods = [text for text in labels if text.startswith("method ")]
    assert methods == ["method 0", "method 1", "method 2"]
    assert "10 other methods" in labels


def test_few_lines_have_a_colour_and_two_a_band(of_many):
    svg = of_many["perplexity"]["wide"]
    lines = re.findall(
        r"<path d=\"[^\"]*\"[^>]*style=\"fill: none;[^\"]*stroke: var\(--(\w+)\)", svg
    )
    assert lines.count("rest") == 10  # of 14 methods, two of them one line, three in colour
    assert {"m0", "m1", "m2", "m3", "control"} <= set(lines)
    bands = set(re.findall(r"fill: var\(--(\w+)\); fill-opacity: 0\.13", svg))
    assert bands == {"m0", "m1"}  # the best method and the plain model


def test_every_y_axis_has_three_labels_at_least():
    rng = random.Random(0)
    for _ in range(300):
        low = 10 ** rng.uniform(-1, 4)
        high = low * 10 ** rng.uniform(0.7, 4)
        ticks = log_ticks(low, high)
        assert 3 <= len(ticks) <= 10
        assert all(low <= tick <= high for tick in ticks)


@pytest.mark.usefixtures("undrawn")
def test_accuracy_that_is_the_same_everywhere_is_no_figure():
    measured = results() | {"perplexity": None}
    assert "accuracy" in draw_figures(*ranked(measured))
    for task in measured["retrieval"]:
        for rows in task["samples"].values():
            for sample in rows:
                sample["score"] = 0.0
    assert "accuracy" not in draw_figures(*ranked(measured))


@pytest.mark.usefixtures("undrawn")
def test_a_heat_map_needs_something_to_show():
    measured = results()
    task = measured["retrieval"][0]
    for sample in task["samples"]["none"]:
        sample["score"] = 0.0
    tables, (line,) = depth_maps(*ranked(measured), task["task"])
    assert [table.name for table in tables] == ["yarn ×2", "linear ×2"]
    assert "plain model" in line
    for rows in task["samples"].values():
        for sample in rows:
            sample["score"] = 1.0
    assert depth_maps(*ranked(measured), task["task"]) == ([], [])
    assert f"retrieval-{task['task']}" not in draw_heat_maps(*ranked(measured))


# -- numbers ---------------------------------------------------------------------------------------


def interval(estimate, low, high):
    return Interval(estimate, low, high, 10, 10)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.028, 1.005, 1.051), "+2.8% (+0.5 to +5.1%)"),
        ((0.97, 0.9, 1.0), "−3.0% (−10.0 to ±0.0%)"),
        ((1.788, 1.438, 2.224), "+78.8% (+43.8 to +122.4%)"),
        ((1.485, 0.01, 150.0), "×1.5 (×0.01 to 150)"),
        ((2.15, 1.85, 3.5), "×2.1 (×1.9 to 3.5)"),
        ((10.0, 8.5, 11.7), "×10 (×8.5 to 12)"),
    ],
)
def test_a_ratio_and_its_interval_have_one_unit(values, text):
    ratio = interval(*values)
    assert f"{change_text(ratio)} ({change_range(ratio)})" == text


def test_a_column_may_choose_the_unit():
    ratio = interval(1.028, 1.005, 1.051)
    assert change_text(ratio, percent=False, unit=False) == "1.028"
    assert change_range(ratio, percent=False, unit=False) == "1.005 to 1.051"


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("change_range", (1.2, 0, math.inf), ""),
        ("perplexity_range", (12.0, 0, math.inf), ""),
        ("nats_range", (0.9, -math.inf, math.inf), ""),
        ("percent_range", (0.5, 0.34, 0.66), "34 to 66%"),
        ("nats_range", (0.61, 0.07, 1.15), "0.07 to 1.15"),
        ("nats_range", (0.55, -0.03, 1.12), "−0.03 to 1.12"),
    ],
)
def test_intervals_have_one_notation_and_none_if_nothing_is_known(kind, values, text):
    assert getattr(evaluation, kind)(interval(*values)) == text


def test_no_interval_of_few_leaves_what_is_possible():
    """Student's interval of two blocks, or of few texts, reaches below 0 nats."""
    measured = many()
    for label in measured["perplexity"]["losses"]:
        measured["perplexity"]["losses"][label] = [[0.2] * 64 + [0.0, 0.9]]
    stats = RunStatistics(measured)
    half = 12.7062 * 0.45  # Student's t of one degree of freedom, times the standard error
    perplexity = stats.average("none", beyond=True)
    assert perplexity.low == 1.0
    assert perplexity.high == pytest.approx(math.exp(0.45 + half), rel=1e-3)
    losses = [stats.answer_loss(label, 8192).mean for label in stats.labels]
    assert min(loss.low for loss in losses) == 0.0
    shares = [stats.accuracy(label, lengths=(8192,)) for label in stats.labels]
    assert all(0 <= share.low <= share.estimate <= share.high <= 1 for share in shares)
