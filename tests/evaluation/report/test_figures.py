"""Test figures: a question each, few colours and bands, labels that fit, axes that can be read."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from report_results import many, results

pytest.importorskip("matplotlib")

from rope_patch.evaluation.report import figures, heatmap, panels
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics


def drawn(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    stats = RunStatistics(measured)
    pictures = figures.draw_figures(stats, Ranking(stats))
    return {name: picture.svgs for name, picture in pictures.items()}


@pytest.fixture(scope="module")
def of_many() -> dict[str, dict[str, str]]:
    return drawn(many())


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_each_figure_asks_a_question(of_many: dict[str, dict[str, str]], width: str) -> None:
    questions = [" ".join(texts(svgs[width])) for svgs in of_many.values()]
    assert {"answers", "perplexity", "stretch"} <= of_many.keys()
    assert all("?" in text for text in questions)


def test_few_lines_have_a_colour_and_two_a_band(of_many: dict[str, dict[str, str]]) -> None:
    svg = of_many["perplexity"]["wide"]
    lines = re.findall(
        r"<path d=\"[^\"]*\"[^>]*style=\"fill: none;[^\"]*stroke: var\(--(\w+)\)", svg
    )
    assert lines.count("rest") == 10  # of 14 methods, two of them one line, three in colour
    assert {"m0", "m1", "m2", "m3", "control"} <= set(lines)
    bands = set(re.findall(r"fill: var\(--(\w+)\); fill-opacity: 0\.13", svg))
    assert bands == {"m0", "m1"}  # the best method and the plain model


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_labels_are_few_however_many_methods_there_are(
    of_many: dict[str, dict[str, str]], width: str
) -> None:
    labels = [text.strip() for text in texts(of_many["perplexity"][width])]
    assert [text for text in labels if text.startswith("method ")] == [
        "method 0", "method 1", "method 2",
    ]  # fmt: skip
    assert "10 other methods" in labels


def test_every_y_axis_has_three_labels_at_least() -> None:
    rng = random.Random(0)
    for _ in range(300):
        low = 10 ** rng.uniform(-1, 4)
        high = low * 10 ** rng.uniform(0.7, 4)
        ticks = panels._log_ticks(low, high)
        assert 3 <= len(ticks) <= 10
        assert all(low <= tick <= high for tick in ticks)


def test_accuracy_that_is_the_same_everywhere_is_no_figure() -> None:
    def panels_of(measured: dict[str, Any]) -> list[panels.Panel]:
        stats = RunStatistics(measured)
        return figures._accuracy_panels(stats, Ranking(stats))

    measured = results()
    assert len(panels_of(measured)) == 1
    for task in measured["retrieval"]:
        for rows in task["samples"].values():
            for sample in rows:
                sample["score"] = 0.0
    assert panels_of(measured) == []


def test_a_heat_map_needs_something_to_show() -> None:
    measured = results()
    task = measured["retrieval"][0]
    for sample in task["samples"]["none"]:
        sample["score"] = 0.0
    stats = RunStatistics(measured)
    tables, lines = heatmap.depth_maps(stats, Ranking(stats), task["task"])
    assert [table.name for table in tables] == ["yarn ×2", "linear ×2"]
    assert lines == ["None right at every length and depth: plain model."]
    for rows in task["samples"].values():
        for sample in rows:
            sample["score"] = 1.0
    stats = RunStatistics(measured)
    assert heatmap.depth_maps(stats, Ranking(stats), task["task"]) == ([], [])
    assert f"retrieval-{task['task']}" not in heatmap.draw_heat_maps(stats, Ranking(stats))
