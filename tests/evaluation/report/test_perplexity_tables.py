"""Test the tables of perplexity, with one control and with two."""

import math

import pytest
from report_results import results

from rope_patch.evaluation.report import perplexity_tables
from rope_patch.evaluation.report.results.run_statistics import RunStatistics


def test_a_control_with_half_the_context_has_a_row_and_old_results_none():
    measured = results()
    first = measured["perplexity"]["control"]
    assert not (old := RunStatistics(measured)).short_control
    losses = [{end: math.log(40.0) for end in ends} for ends in first["losses"]]
    measured["perplexity"]["short_control"] = {"context": 1024, "losses": losses}
    new = RunStatistics(measured)
    assert len(new.short_control) == len(new.control) > 0
    assert [row.name for row in perplexity_tables.tables(new)[0].rows[-2:]] == [
        "text cut to 2,048",
        "text cut to 1,024",
    ]
    assert all(i.estimate == pytest.approx(40.0) for i in new.short_control.values())
    for label in new.losses:  # compared with the first control alone
        assert new.ratio_to_control(label) == old.ratio_to_control(label)
