"""The order of methods: by the deciding measure, equals as one row, the rest folded."""

import pytest
from helpers.report_results import many, method, results

from rope_patch.evaluation import (
    Ranking,
    RunStatistics,
    accuracy_tables,
    cost_table,
    first_screen,
    fitted_table,
    ratio_column,
    short_table,
    summary_table,
)
from rope_patch.statistics import Interval


def ranked(measured):
    stats = RunStatistics(measured)
    return stats, Ranking(stats)


def summary_of(*runs):
    table, _ = summary_table([(title, *ranked(measured)) for title, measured in runs])
    return table


def test_methods_are_sorted_by_the_likelihood_of_right_answers():
    stats, ranking = ranked(many())
    losses = [
        loss.mean.estimate
        for labels in ranking.groups
        if (loss := stats.answer_loss(labels[0], 8192)) is not None
    ]
    assert losses == sorted(losses)
    assert len(losses) == 14  # the plain model, and 13 of which one is two methods
    assert ranking.best == "method 0"


def test_without_answers_perplexity_beyond_decides_the_order():
    measured = results() | {"retrieval": [], "control": []}
    assert [labels[0] for labels in ranked(measured)[1].groups] == ["yarn ×2", "linear ×2", "none"]


def test_methods_with_the_same_numbers_everywhere_are_one_row_but_for_times():
    measured = many()
    stats, ranking = ranked(measured)
    assert ["method 0", "method 13"] in ranking.groups
    names = [row.name for row in summary_of(("", measured)).rows]
    assert names.count("method 0 = method 13") == 1
    rows = ranking.arrange(cost_table(stats), merge=False).rows
    assert {"method 0", "method 13"} <= {row.name for row in rows}
    measured["perplexity"]["losses"]["method 13"][0][0] += 1e-9
    assert ["method 0", "method 13"] not in ranked(measured)[1].groups


def test_a_table_shows_eight_rows_with_the_plain_model_and_folds_the_rest():
    table = summary_of(("", many()))
    assert len(table.shown) == 8
    assert table.shown[-1].name == "plain model"
    assert [row.name for row in table.shown[:2]] == ["method 0 = method 13", "method 1"]
    assert len(table.shown) + len(table.folded) == 14
    assert len(summary_of(("", results())).folded) == 0


def test_each_task_has_its_own_eight_rows():
    measured = many()
    measured["retrieval"].append(measured["retrieval"][0] | {"task": "rp_vt"})
    stats, ranking = ranked(measured)
    *_, by_task = accuracy_tables(stats)
    shown = ranking.arrange(by_task).shown
    assert [sum(row.group == group for row in shown) for group in ("niah_single_1", "vt")] == [8, 8]


def test_the_table_has_a_row_per_method_and_run():
    first, second = results(), results()
    second["methods"] = second["methods"][:1]
    table = summary_of(("A", first), ("B", second))
    assert [(row.group, row.name) for row in table.rows] == [
        ("A", "yarn ×2"), ("A", "linear ×2"), ("A", "plain model"), ("B", "plain model"),
    ]  # fmt: skip
    assert {len(row.cells) for row in table.rows} == {len(table.columns)}


def test_the_best_is_marked_only_where_all_others_are_shown_to_be_worse():
    def best_of(measured):
        return [row.name for row in summary_of(("", measured)).rows if row.best]

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


def test_each_method_has_a_look_of_its_own_best_first():
    _, ranking = ranked(many())
    assert len(set(ranking.looks.values())) == len(ranking.looks) == 15
    best = [ranking.colours[labels[0]] for labels in ranking.groups[:3]]
    assert best == ["m0", "m3", "m5"]  # m2 is of the method that equals the first
    assert "m1" not in [ranking.colours[f"method {i}"] for i in range(14)]  # the plain model's


def test_a_price_that_a_caution_empties_is_not_told():
    measured = results()
    said = [row.cells[2].text for row in summary_of(("", measured)).rows]
    assert said == ["+1.3%, ±0.0 points", "+24.7%, −3.8 points", "base"]
    measured["run"]["cautions"] = ["the model reads these documents no better than chance: it"]
    told = [row.cells[2].text for row in summary_of(("", measured)).rows]
    assert told == ["cannot tell, ±0.0 points", "cannot tell, −3.8 points", "base"]
    rows = first_screen(*ranked(measured))["methods"]
    assert {row["price_perplexity"] is None for row in rows.values()} == {True}


def test_a_column_of_ratios_has_one_unit_in_its_head():
    head = "perplexity up to 4,096"
    near = [c for c in short_table(ranked(results())[0]).columns if c.text == head]
    assert ["%" in column.note for column in near] == [True]
    measured = results()
    for document in measured["perplexity"]["losses"]["linear ×2"]:
        document[:] = [nats + 2 for nats in document]
    table = short_table(ranked(measured)[0])
    (at,) = (i for i, c in enumerate(table.columns) if c.text == head)
    assert "times" in table.columns[at].note
    texts = [row.cells[at].text + row.cells[at].note for row in table.rows]
    assert not any(mark in text for text in texts for mark in "%×+−")


def test_a_ratio_that_could_be_anything_leaves_the_column_and_its_unit_alone():
    known = Interval(1.03, 1.02, 1.04, 8, 8)
    _, cells = ratio_column([known, Interval(5.4, 0.45, 65, 4, 4)], "perplexity", "the control")
    assert [(cell.text, cell.note) for cell in cells] == [
        ("+3.0", "+2.0 to +4.0"),
        ("cannot tell", ""),
    ]
    large = Interval(40, 3, 500, 4, 4)  # surely above 1, however wide
    _, cells = ratio_column([large], "perplexity", "the control")
    assert cells[0].text == "40"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("measured", [results, many])
def test_a_table_fits_the_terminal_and_names_what_is_left_out(measured, width):
    table = summary_of(("", measured()))
    text = fitted_table(table, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for row in table.shown:
        assert row.name.split(" = ")[0].split()[0] in text
    assert not any(row.name in text for row in table.folded)
    if table.folded:
        assert f"{len(table.folded)} more rows" in flat
    shown_heads, _, left_out = flat.partition("the columns")
    for column in table.columns:
        words = column.text.split()
        assert column.text in left_out or all(word in shown_heads for word in words)
