"""Test the benchmark against plain lm-eval: equal scores, and pieces that are measured once."""

import json
from pathlib import Path

import pytest

from rope_patch.benchmarks import prefix_sharing

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
TASKS = ["rp_recall", "rp_recall_ll", "rp_recall_mc"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharing") / "report.json"
    prefix_sharing.main(str(TINY), "600", ",".join(TASKS), samples=4, per_text=4, out=path)
    return path


def test_both_give_the_same_scores(report):
    (row,) = json.loads(report.read_text())["rows"]
    assert row["tasks"] == TASKS
    assert row["scores"]["ours"] == row["scores"]["lm_eval"]
    assert len(row["scores"]["ours"]) == row["samples"] == 12


def test_a_prompt_is_read_once_for_all_tasks(report):
    """Texts are generated after the prompts that targets and choices are scored after, too."""
    (row,) = json.loads(report.read_text())["rows"]
    assert row["tokens_asked"] == pytest.approx(2 * 4 * 600, rel=0.05)
    assert row["tokens_read"] < row["tokens_asked"] / 2


def test_stored_pieces_are_not_measured_again(report, monkeypatch, capsys):
    monkeypatch.setattr(prefix_sharing, "_time", None)  # measuring would fail
    prefix_sharing.main(str(TINY), "600", ",".join(TASKS), samples=4, per_text=4, out=report)
    assert "times less CPU time" in capsys.readouterr().out


def test_results_of_another_request_are_kept(report):
    with pytest.raises(ValueError, match="results for another samples"):
        prefix_sharing.main(str(TINY), "600", ",".join(TASKS), samples=2, per_text=4, out=report)
