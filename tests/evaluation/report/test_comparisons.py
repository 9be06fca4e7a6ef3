"""Tests between methods: one family at the longest length, and looks at growing data."""

from __future__ import annotations

import random
from typing import Any

import pytest
from report_results import results, retrieval

from rope_patch.evaluation.merging import merge_runs
from rope_patch.evaluation.report.cost_tables import short_table
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.retrieval_tables import tables
from rope_patch.evaluation.report.summary import sentences


def test_only_the_mean_over_tasks_at_the_longest_length_is_tested() -> None:
    """A single task of several and a shorter length bear no mark, be they ever so different."""
    few: Any = {"lengths": (2048, 6144, 8192), "count": 30}
    both = [retrieval(name, **few) for name in ("rp_niah_single_1", "rp_vt")]
    for task in both:
        for label, rows in task["samples"].items():
            for row in rows:
                row |= {"score": float(label == "yarn ×2"), "text": row["id"]}
    averages, by_task = tables(RunStatistics(results() | {"retrieval": both}))
    assert [cell.text for cell in averages.rows[1].cells[:3]] == ["100%", "100%", "▲◆ 100%"]
    assert {cell.text for row in by_task.rows for cell in row.cells} == {"0%", "100%"}
    assert not any(", p " in cell.tip for row in by_task.rows for cell in row.cells)
    assert "+100.0 points (+81.2 to +100.0)" in by_task.rows[1].cells[0].tip


def test_marks_come_by_chance_in_one_report_of_twenty() -> None:
    """Methods that are all as good as the plain model, at four lengths of three tasks."""
    marked = 0
    for seed in range(60):
        rng = random.Random(seed)
        retrieved = [
            retrieval(name, count=24) for name in ("rp_niah_single_1", "rp_niah_single_2", "rp_vt")
        ]
        for row in (r for t in retrieved for rows in t["samples"].values() for r in rows):
            row |= {"score": float(rng.random() < 0.5)}
        text = str(tables(RunStatistics(results() | {"retrieval": retrieved})))
        marked += any(mark in text for mark in "▲▼◆")
    assert marked <= 8  # 60 times .05, and three standard deviations


def test_looks_at_growing_data_are_corrected() -> None:
    """A run that was looked at twice tests each p at a sixth of the level, and says so."""
    task = retrieval("rp_niah_single_1", lengths=(2048, 8192), count=30)
    plain = results() | {"retrieval": [task]}
    looked = plain | {"run": plain["run"] | {"looks": [15, 30]}}
    fixed, grown = RunStatistics(plain), RunStatistics(looked)
    for label, (_, p) in fixed.accuracy_comparisons().items():
        assert grown.accuracy_comparisons()[label][1] == pytest.approx(min(1, 6 * p))
    for label, (test, p) in fixed.comparisons_with_plain(8192).items():
        wider, corrected = grown.comparisons_with_plain(8192)[label]
        assert corrected == pytest.approx(min(1, 6 * p))
        assert wider.mean.half_width > test.mean.half_width
    assert fixed.comparisons_with_plain(2048) == grown.comparisons_with_plain(2048)
    assert "after Holm over 2 methods and 2 looks at growing data" in sentences(grown)[0]


def test_runs_that_are_merged_are_corrected_for_the_more_looks() -> None:
    runs: Any = []
    for label, looks in (("yarn ×2", [30]), ("linear ×2", [15, 30])):
        task = retrieval("rp_niah_single_1", ("none", label), lengths=(2048, 8192))
        run = results() | {"retrieval": [task], "short": [], "perplexity": None, "cost": {}}
        methods = [m for m in run["methods"] if m["label"] in ("none", label)]
        runs.append(run | {"run": run["run"] | {"looks": looks}, "methods": methods})
    (merged,) = merge_runs(runs)
    assert RunStatistics(merged).look_factor() == 6
    assert len(RunStatistics(merged).accuracy_comparisons()) == 2


def test_short_tasks_are_tested_together_and_corrected_over_the_methods() -> None:
    """Eight losses of 100 without a win are McNemar's p of 1/128: .0156 after Holm over two."""
    scores = [1] * 100
    short = {"task": "cloze", "n": 100, "chance": None, "samples": {"none": scores}}
    short["samples"] |= {"yarn ×2": [0] * 8 + scores[8:], "linear ×2": scores}
    same = short | {"task": "facts", "samples": dict.fromkeys(short["samples"], scores)}
    for tasks, marked in (([short], [True]), ([short, same], [False, False, True])):
        stats = RunStatistics(results() | {"short": tasks, "perplexity": None})
        assert stats.short_p_values == {"yarn ×2": pytest.approx(2 * 2**-7), "linear ×2": 1}
        table = short_table(stats)
        assert table is not None
        plain, yarn, linear = (
            [cell.text.endswith(" *") for cell in row.cells] for row in table.rows
        )
        assert yarn == marked
        assert not any(plain + linear)
        assert any("p = 0.016 after Holm over 2 methods" in s for s in sentences(stats))
