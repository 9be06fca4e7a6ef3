"""Test that a report with missing parts starts with them, and exits with status 1."""

import json

import pytest
from helpers.commands import run_in_this_process
from helpers.evaluations import TINY
from helpers.report_results import results
from transformers import LlamaForCausalLM

from rope_patch.evaluation import find_gaps, gap_sentence, merge_runs, write_report
from rope_patch.evaluation.measures import perplexity
from rope_patch.utils import add_checksum

pytestmark = pytest.mark.usefixtures("undrawn")


def results_without_gaps():
    measured = results()
    measured["run"]["not_run"] = []
    return measured


def fail_samples(measured, number, label, length=None, keep=0):
    """Let a method's samples of a task fail, except the first `keep`; return the task's name."""
    entry = measured["retrieval"][number]
    rows = [row for row in entry["samples"][label] if length in (None, row["length"])]
    for row in rows[keep:]:
        row |= {"score": None, "log_likelihood": None, "error": "RuntimeError: boom"}
    return entry["task"]


def first_line(folder):
    return (folder / "report.md").read_text().replace("\\", "").splitlines()[0]


def test_a_complete_run_and_a_failed_sample_among_others_are_no_gap():
    measured = results_without_gaps()
    assert find_gaps(measured) == []
    fail_samples(measured, 0, "yarn ×2", 2048, keep=1)
    assert find_gaps(measured) == []


def test_a_score_without_samples_is_a_gap_and_reported_first(tmp_path):
    measured = results_without_gaps()
    names = [
        f"{fail_samples(measured, 0, 'yarn ×2', 8192)}, yarn ×2, 8,192 tokens",
        f"{fail_samples(measured, 1, 'linear ×2')}, linear ×2",
    ]
    assert find_gaps(measured) == [f"{name}: RuntimeError: boom" for name in names]
    write_report(measured, tmp_path)
    sentence = f"Incomplete: 2 parts were not measured ({'; '.join(names)})"
    assert first_line(tmp_path).startswith(f"**{sentence}")
    page = (tmp_path / "report.html").read_text()
    assert 0 < page.index(sentence) < page.index("<h1>")


def test_merged_runs_have_the_gaps_of_all():
    first, second = results(), results()
    for run, label in ((first, "yarn ×2"), (second, "linear ×2")):
        run["run"] |= {"weights": "same", "not_run": [f"perplexity of {label}: boom"]}
        run["methods"] = [m for m in run["methods"] if m["label"] in ("none", label)]
        for entry in run["retrieval"]:
            entry["samples"] = {k: v for k, v in entry["samples"].items() if k in ("none", label)}
    (joined,) = merge_runs([first, second])
    assert find_gaps(joined) == ["perplexity of yarn ×2: boom", "perplexity of linear ×2: boom"]


def test_many_gaps_are_one_sentence():
    text = gap_sentence([f"part {i}: boom" for i in range(9)])
    assert [f"part {i}" in text for i in range(9)] == [True] * 6 + [False] * 3
    assert "3 more" in text
    assert "boom" not in text


def test_a_missing_control_exits_with_1_until_it_is_measured(tmp_path, monkeypatch):
    original = perplexity.control_loss
    command = ["eval", TINY, "--method", "none", "--lengths", "352", "--tasks", "perplexity"]
    command += ["--control-context", "100", "--report", tmp_path / "out", "--json"]

    def fail(*_):
        raise RuntimeError("boom")

    monkeypatch.setattr(perplexity, "control_loss", fail)
    status, out, err = run_in_this_process(*command)
    assert status == 1
    assert json.loads(out) == json.loads((tmp_path / "out" / "report.json").read_text())
    assert json.loads(out)["perplexity"]["losses"]["none"]
    sentence = "Incomplete: 1 part was not measured (the control of perplexity)"
    assert sentence in err
    first = first_line(tmp_path / "out")
    assert first.startswith(f"**{sentence}")
    status, out, err = run_in_this_process("report", tmp_path / "out", "--out", tmp_path / "again")
    assert (status, out.splitlines()[-1]) == (1, f"{tmp_path / 'again' / 'report.html'}")
    assert err.startswith(sentence)
    assert first_line(tmp_path / "again") == first

    monkeypatch.setattr(perplexity, "control_loss", original)
    status, out, err = run_in_this_process(*command)
    assert (status, "Incomplete" in err) == (0, False)
    assert first_line(tmp_path / "out").startswith("# ")


def test_a_task_without_successful_samples_exits_with_1(tmp_path, monkeypatch):
    forward = LlamaForCausalLM.forward

    def fail(self, input_ids=None, **kwargs):
        if input_ids.shape[-1] > 300:
            raise RuntimeError("boom")
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    command = ["eval", TINY, "--method", "none", "--lengths", "256,352", "--samples", "1"]
    command += ["--depths", "50", "--tasks", "rp_json_kv_ll", "--report", tmp_path]
    status, _, err = run_in_this_process(*command)
    assert status == 1
    assert "rp_json_kv_ll, none, 352 tokens" in err


def test_a_report_of_forged_results_names_the_file(tmp_path):
    measured = results()
    measured["run"]["trained_length"] = "long"
    (tmp_path / "report.json").write_text(json.dumps(add_checksum(measured)))
    status, out, err = run_in_this_process("report", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert str(tmp_path / "report.json") in err
