"""Test heat maps: a row a depth, a column a length."""

import pytest
from report_results import results, retrieval

from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.retrieval_tables import heat_maps


def test_heat_maps_show_each_depth_and_length() -> None:
    task = retrieval("rp_niah_single_1", count=30)
    run = RunStatistics(results() | {"retrieval": [task]})
    for table in heat_maps(run, "rp_niah_single_1"):
        label = next(name for name, table_name in run.names.items() if table_name == table.name)
        for row, depth in zip(table.rows, (10, 50, 90), strict=True):
            for cell, length in zip(row.cells, task["lengths"], strict=True):
                scores = [
                    s["score"]
                    for s in task["samples"][label]
                    if (s["depth"], s["length"]) == (depth, length)
                ]
                assert cell.text == f"{sum(scores):.0f}/{len(scores)}"
                assert cell.share == pytest.approx(sum(scores) / len(scores))
