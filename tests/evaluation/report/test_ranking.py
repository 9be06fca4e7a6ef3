"""Test the order of methods: by the deciding measure, equals as one row, the rest folded."""

from __future__ import annotations

from typing import Any

from report_results import many, method, results

from rope_patch.evaluation.report import cost_tables, retrieval_tables
from rope_patch.evaluation.report.ranking import MAX_ROWS, PLAIN, REST, Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.summary_table import summary_table
from rope_patch.evaluation.report.table import Table, ratio_column
from rope_patch.statistics import Interval


def ranked(measured: dict[str, Any]) -> tuple[RunStatistics, Ranking]:
    stats = RunStatistics(measured)
    return stats, Ranking(stats)


def summary_of(measured: dict[str, Any]) -> Table:
    table, _ = summary_table([("", *ranked(measured))])
    assert table is not None
    return table


def test_methods_are_sorted_by_the_likelihood_of_right_answers() -> None:
    stats, ranking = ranked(many())
    losses = [
        loss.mean.estimate
        for labels in ranking.groups
        if (loss := stats.answer_loss(labels[0], 8192)) is not None
    ]
    assert losses == sorted(losses)
    assert len(losses) == 14  # the plain model, and 13 of which one is two methods
    assert ranking.best == "method 0"


def test_without_answers_perplexity_beyond_decides_the_order() -> None:
    measured = results() | {"retrieval": [], "control": []}
    assert [labels[0] for labels in ranked(measured)[1].groups] == ["yarn ×2", "linear ×2", "none"]


def test_methods_with_the_same_numbers_everywhere_are_one_row() -> None:
    measured = many()
    _, ranking = ranked(measured)
    assert ["method 0", "method 13"] in ranking.groups
    table = summary_of(measured)
    assert [row.name for row in table.rows].count("method 0 = method 13") == 1
    measured["perplexity"]["losses"]["method 13"][0][0] += 1e-9
    assert ["method 0", "method 13"] not in ranked(measured)[1].groups


def test_times_are_told_apart_where_all_else_is_the_same() -> None:
    stats, ranking = ranked(many())
    times = cost_tables.cost_table(stats)
    assert times is not None
    rows = ranking.arrange(times, merge=False).rows
    assert {"method 0", "method 13"} <= {row.name for row in rows}


def test_a_table_shows_eight_rows_with_the_plain_model_and_folds_the_rest() -> None:
    table = summary_of(many())
    assert len(table.shown) == MAX_ROWS
    assert table.shown[-1].name == "plain model"
    assert [row.name for row in table.shown[:2]] == ["method 0 = method 13", "method 1"]
    assert len(table.shown) + len(table.folded) == 14
    assert len(summary_of(results()).folded) == 0


def test_each_task_has_its_own_eight_rows() -> None:
    measured = many()
    measured["retrieval"].append(measured["retrieval"][0] | {"task": "rp_vt"})
    stats, ranking = ranked(measured)
    *_, by_task = retrieval_tables.tables(stats)
    shown = ranking.arrange(by_task).shown
    assert [sum(row.group == group for row in shown) for group in ("niah_single_1", "vt")] == [8, 8]


def test_the_best_is_marked_only_where_all_others_are_shown_to_be_worse() -> None:
    def best_of(measured: dict[str, Any]) -> list[str]:
        return [row.name for row in summary_of(measured).rows if row.best]

    measured = results()
    assert best_of(measured) == ["yarn ×2"]
    # A second method as good: neither is the best.
    samples = measured["retrieval"][0]["samples"]
    measured["retrieval"] = measured["retrieval"][:1]
    measured["methods"].append(method("ntk ×2"))
    samples["ntk ×2"] = [
        s | {"log_likelihood": s["log_likelihood"] + 0.02 * (-1) ** s["text"]}
        for s in samples["yarn ×2"]
    ]
    assert best_of(measured) == []
    # The same answers at that length under both: both are.
    samples["ntk ×2"] = [
        s | {"log_likelihood": s["log_likelihood"] - 1.0 * (s["length"] == 2048)}
        for s in samples["yarn ×2"]
    ]
    assert sorted(best_of(measured)) == ["ntk ×2", "yarn ×2"]


def test_the_best_three_and_the_plain_model_have_colours_of_their_own() -> None:
    _, ranking = ranked(many())
    coloured = [labels[0] for labels in ranking.groups if ranking.colours[labels[0]] != REST]
    assert coloured == ["method 0", "method 1", "method 2", "none"]
    assert len({ranking.colours[label] for label in coloured}) == 4
    assert ranking.colours["none"] == PLAIN
    assert ranking.colours["method 13"] == ranking.colours["method 0"]


def test_a_column_with_one_value_is_a_line() -> None:
    table, lines = summary_table([("", *ranked(many()))])
    assert table is not None
    assert not any("cache" in column.text for column in table.columns)
    assert "The same with every method: cache and a step (MB): 3,000.0." in lines


def test_a_column_of_ratios_has_one_unit_in_its_head() -> None:
    near = [c for c in summary_of(results()).columns if c.text == "perplexity up to 4,096"]
    assert [column.note for column in near] == ["% change from the plain model"]
    measured = results()
    for document in measured["perplexity"]["losses"]["linear ×2"]:
        document[:] = [nats + 2 for nats in document]
    table = summary_of(measured)
    (at,) = (i for i, c in enumerate(table.columns) if c.text == "perplexity up to 4,096")
    assert table.columns[at].note == "times that of the plain model"
    texts = [row.cells[at].text + row.cells[at].note for row in table.rows]
    assert not any(mark in text for text in texts for mark in "%×+−")


def test_a_ratio_that_could_be_anything_leaves_the_column_and_its_unit_alone() -> None:
    known = Interval(1.03, 1.02, 1.04, 8, 8)
    _, cells = ratio_column([known, Interval(5.4, 0.45, 65, 4, 4)], "perplexity", "the control")
    assert [(cell.text, cell.note) for cell in cells] == [("+3.0", "+2.0 to +4.0"), ("–", "")]
    large = Interval(40, 3, 500, 4, 4)  # surely above 1, however wide
    _, cells = ratio_column([large], "perplexity", "the control")
    assert cells[0].text == "40"
