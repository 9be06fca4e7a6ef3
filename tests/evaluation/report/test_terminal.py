"""Test what a terminal shows: the headline and the table, within its width."""

from __future__ import annotations

import pytest
from report_results import many, results

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from rope_patch.evaluation.report import terminal
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.summary_table import summary_table


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("measured", [results, many])
def test_a_table_fits_the_terminal_and_names_what_is_left_out(measured, width):
    stats = RunStatistics(measured())
    table, _ = summary_table([("", stats, Ranking(stats))])
    text = terminal.fitted_table(table, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
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


def test_the_overview_has_the_sentence_the_table_and_cautions():
    stats = RunStatistics(results())
    table, lines = summary_table([("", stats, Ranking(stats))])
    run = {"headline": "Use it.", "warnings": ["Careful."], "cautions": ["a caution"]}
    page = {"title": "Tiny", "runs": [run], "summary": table, "summary_lines": lines}
    text = terminal.overview(page, 80)
    assert text.startswith("Tiny\nUse it.\n\nMethods, best first by ")
    assert text.endswith("caution: Careful.\ncaution: a caution")
    assert "* yarn ×2" in text
    assert "* all others are shown to be worse" in text
