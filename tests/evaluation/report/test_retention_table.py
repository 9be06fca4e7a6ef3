"""Test the table of retention: only what can tell something is in it."""

import pytest
from report_results import results, retrieval

from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.retrieval_tables import can_tell, retention_table
from rope_patch.evaluation.report.summary_table import summary_table


@pytest.mark.parametrize(("count", "is_shown"), [(1, False), (60, True)])
def test_retention_is_shown_where_its_interval_says_something(count, is_shown):
    run = RunStatistics(results() | {"retrieval": [retrieval("rp_niah_single_1", count=count)]})
    kept = [run.retention(label, run.lengths[-1]) for label in run.labels]
    assert any(map(can_tell, kept)) == is_shown
    assert (retention_table(run) is not None) == is_shown
    table, _ = summary_table([("", run, Ranking(run))])
    assert table is not None
    assert any(head.text.startswith("accuracy kept") for head in table.columns) == is_shown
