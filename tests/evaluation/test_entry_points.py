"""Test `rope_patch.evaluate` and `rope_patch.compare`: the commands' results, from Python."""

import json
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from helpers.tiny_models import make_model

import rope_patch

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
OPTIONS = {"factor": 2, "lengths": [256, 400], "tasks": ["rp_recall_ll"], "samples": 4}
WORDS = ["--factor", 2, "--lengths", "256,400", "--tasks", "rp_recall_ll", "--samples", 4]
VARIABLE = ("date", "seconds", "command", "peak_memory", "hardware", "continued", "prompt_tokens")


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    return rope_patch.evaluate(TINY, ["none", "yarn"], out=folder, **OPTIONS)


def stored(folder):
    """Return a folder's results without what differs between two runs."""
    results = json.loads((folder / "report.json").read_text())
    run = {key: value for key, value in results["run"].items() if key not in VARIABLE}
    return {**results, "run": run, "checksum": None, "sha256": None}


def test_evaluate_measures_what_the_command_measures(evaluation, tmp_path):
    words = ["eval", TINY, "--method", "none,yarn", *WORDS, "--out", tmp_path]
    assert run_in_this_process(*words).returncode == 0
    expected, got = stored(tmp_path), stored(evaluation.folder)
    for part in ("methods", "retrieval", "control"):
        assert got[part] == expected[part]
    assert got["run"].keys() == expected["run"].keys()


def test_an_evaluation_reads_as_the_report_does(evaluation):
    page = (evaluation.folder / "report.md").read_text()
    assert evaluation.verdict in page.replace("\n", " ")
    assert str(evaluation) == evaluation.overview
    assert "yarn" in evaluation.overview
    assert evaluation.report.is_file()
    assert all(path.read_bytes()[1:4] == b"PNG" for path in evaluation.figures.values())
    assert {"answers"} <= evaluation.figures.keys()
    html = evaluation._repr_html_()
    assert html.startswith("<div><strong>")
    assert "yarn" in html


def test_the_overview_is_shown_once(tmp_path):
    shown = []
    options = {**OPTIONS, "lengths": [128]}
    done = rope_patch.evaluate(TINY, out=tmp_path, show=shown.append, **options)
    assert shown == [done.overview]


def test_compare_takes_what_is_left_out_from_the_profile(tmp_path):
    options = {"factor": 2, "lengths": (256, 400), "tasks": ["rp_recall_ll"], "documents": 1}
    done = rope_patch.compare(TINY, ["linear"], profile="quick", out=tmp_path / "a", **options)
    words = ["compare", TINY, "--method", "linear", *WORDS[:6], "--profile", "quick"]
    result = run_in_this_process(*words, "--documents", 1, "--out", tmp_path / "b")
    assert result.returncode == 0
    expected = stored(tmp_path / "b")
    assert [m["label"] for m in done.results["methods"]] == [
        m["label"] for m in expected["methods"]
    ]
    for part in ("retrieval", "control"):
        assert stored(tmp_path / "a")[part] == expected[part]
    assert len(expected["retrieval"][0]["samples"]["none"]) == 2 * 10  # of quick, at two lengths


@pytest.mark.parametrize("function", [rope_patch.evaluate, rope_patch.compare])
def test_wrong_arguments_are_refused_before_anything_is_written(function, tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(TypeError, match=r"got a LlamaForCausalLM.*rope_patch\.save first"):
        function(make_model(), out=folder)
    with pytest.raises(TypeError, match=r"unknown option 'sample' .did you mean 'samples'"):
        function(TINY, ["yarn"], factor=2, sample=4, out=folder)
    with pytest.raises(ValueError, match=r"methods must be a list.*\['yarn'\]"):
        function(TINY, "yarn", factor=2, out=folder)
    with pytest.raises(ValueError, match="unknown method 'yarm'"):
        function(TINY, ["yarm"], factor=2, out=folder)
    assert not folder.exists()
