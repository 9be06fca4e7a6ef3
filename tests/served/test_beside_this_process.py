"""Test reports that put a server's answers beside those of a model in this process."""

import json

import pytest
from helpers.commands import run_in_this_process
from helpers.evaluations import TEXT, TINY
from helpers.schema import problems
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation import RunRecord

ASKED = {
    "tasks": ["rp_recall_ll", "rp_short_cloze", "perplexity"],
    "lengths": [200, 900],
    "samples": 6,
    "texts": [TEXT],
    "perplexity_length": 448,
    "window": 32,
    "control_context": 128,
    "short_samples": 3,
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return the folder of the plain model and YaRN, evaluated in this process."""
    folder = tmp_path_factory.mktemp("here")
    rope_patch.evaluate(TINY, ["none", "yarn"], factor=4, out=folder, **ASKED)
    return folder


def report(*words):
    return run_in_this_process("report", *words)


def evaluate_server(make_server, folder, **settings):
    with make_server(**settings).running() as url:
        rope_patch.evaluate_server(url, TINY, out=folder, verify=False, **ASKED)


def agreement(folder):
    """Return the section's table as lists of cells, and its lines."""
    page = (folder / "report.md").read_text()
    section = page.partition("<summary>Question by question</summary>\n")[2].partition(
        "</details>"
    )[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return rows[2:], [line[2:] for line in section.splitlines() if line.startswith("- ")]


def test_a_server_agrees_with_the_method_that_it_rotates_by(make_server, here, tmp_path):
    evaluate_server(make_server, tmp_path / "yarn")
    output = report(here, "--served", f"engine={tmp_path / 'yarn'}", "--out", tmp_path / "both")
    assert output.returncode == 0, output.stderr
    results = json.loads((tmp_path / "both" / "report.json").read_text())
    del results["format"], results["digest"]  # the file's own
    assert list(problems(results, RunRecord)) == []
    labels = [method["label"] for method in results["methods"]]
    assert labels == ["none", "yarn ×4", "engine"]
    samples = results["retrieval"][0]["samples"]
    rows, lines = agreement(tmp_path / "both")
    assert [row[:2] for row in rows] == [
        ["server engine, yarn ×4", "12"],
        ["server engine, plain model", "12"],
    ]
    for row, label in zip(rows, ("yarn ×4", "none"), strict=True):
        pairs = list(zip(samples["engine"], samples[label], strict=True))
        assert int(row[2]) == sum(a["score"] == b["score"] for a, b in pairs)
        apart = [abs(a["log_likelihood"] - b["log_likelihood"]) for a, b in pairs]
        assert float(row[3]) == pytest.approx(sum(apart) / len(apart), rel=0.06)
        assert float(row[4]) == pytest.approx(max(apart), rel=0.06)
    assert float(rows[0][4]) < 1e-3 < 0.1 < float(rows[1][4])
    assert "closest to yarn ×4: 12 of 12 scores are the same" in lines[0]
    assert lines[0].endswith("which is rounding.")
    # Written again from the saved results, the page is the same.
    again = report(tmp_path / "both", "--out", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert agreement(tmp_path / "again") == (rows, lines)


def test_questions_with_other_scores_are_named(make_server, here, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    evaluate_server(make_server, tmp_path / "served", model=plain)
    only_yarn = tmp_path / "yarn"
    rope_patch.evaluate(TINY, ["yarn"], factor=4, out=only_yarn, **ASKED)
    output = report(only_yarn, "--served", tmp_path / "served", "--out", tmp_path / "both")
    assert output.returncode == 0, output.stderr
    results = json.loads((tmp_path / "both" / "report.json").read_text())
    samples = results["retrieval"][0]["samples"]
    differing = [
        mine["id"].removeprefix("42/")
        for mine, other in zip(samples["yarn ×4"], samples["served"], strict=True)
        if mine["score"] != other["score"]
    ]
    _, (_, names) = agreement(tmp_path / "both")
    assert differing
    assert names.count("served") == len(differing)
    assert all(name.rpartition("/")[2] in names for name in differing)


@pytest.mark.parametrize(
    ("option", "run", "fact"),
    [
        ("--served", "here", "expected that of `eval URL`"),
        ("--trained", "served", "give it as --served"),
        ("--served", "other questions", "differ in questions"),
    ],
)
def test_runs_that_do_not_belong_there_are_refused(make_server, here, tmp_path, option, run, fact):
    folder = tmp_path / "run"
    if run == "here":
        folder = here
    else:
        few = {**ASKED, **({"samples": 3} if run == "other questions" else {})}
        with make_server().running() as url:
            rope_patch.evaluate_server(url, TINY, out=folder, verify=False, **few)
    output = report(here, option, f"label={folder}", "--out", tmp_path / "both")
    assert output.returncode == 2
    assert fact in output.stderr
    assert not (tmp_path / "both").exists()
