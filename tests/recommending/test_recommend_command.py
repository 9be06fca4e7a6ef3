"""Test `rope-patch recommend`: output, files, continuation and refusals."""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.commands import run_in_this_process
from helpers.search_fixtures import questions, write_samples

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run_recommend(*arguments):
    return run_in_this_process("recommend", *arguments)


@pytest.fixture(scope="module")
def samples_file(tmp_path_factory):
    """Return a file of samples of two lengths in the format of training data."""
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    return write_samples(path, questions(512, 6, seed=3) + questions(256, 6, seed=2))


@pytest.fixture(scope="module")
def finished_run(samples_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    arguments = ["--length", 512, "--minutes", 30, "--samples", samples_file, "--out", out]
    return out, run_recommend(TINY, *arguments), run_recommend(TINY, *arguments, "--json")


def test_the_verdict_is_printed_and_written(finished_run):
    out, run, again = finished_run
    assert run.returncode == 0, run.stderr
    recommendation = json.loads((out / "recommendation.json").read_text())
    assert recommendation["outcome"] == "use"
    assert recommendation["verdict"] in run.stdout
    assert recommendation["python"] in run.stdout
    assert run.stdout.endswith(f"\n\n{out / 'recommendation.md'}\n")
    assert recommendation["shell"].startswith(f"rope-patch export {TINY} --engine")
    page = (out / "recommendation.md").read_text()
    assert recommendation["verdict"] in page
    assert "rope-patch recommend" in page
    assert "s for a sample of 512 tokens" in run.stderr
    assert "\r" not in run.stderr  # no progress bars in a log
    assert "a search: it needs samples of its own" in run.stdout
    assert json.loads(again.stdout)["verdict"] == recommendation["verdict"]


def test_the_recommended_export_command_runs(finished_run):
    out, _, _ = finished_run
    recommendation = json.loads((out / "recommendation.json").read_text())
    words = recommendation["shell"].split()
    result = run_in_this_process(*words[1:], "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["engine"] in recommendation["shell"]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--length", 512, "--minutes", 0], "more than 0 minutes"),
        (["--length", 512, "--minutes", 0.00001], "the budget is too small"),
        (["--length", 100, "--minutes", 1], "trained"),
        (["--length", 512, "--minutes", 1, "--dtype", "int8"], "dtype"),
        (["--length", 512, "--minutes", 1, "--samples", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_error_line(samples_file, tmp_path, arguments, fact):
    sample_options = [] if "--samples" in arguments else ["--samples", samples_file]
    result = run_recommend(TINY, *arguments, *sample_options, "--out", tmp_path / "out")
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert fact in line


def test_a_second_run_in_a_folder_is_refused(samples_file, tmp_path):
    with FileLock(tmp_path / ".lock"):
        result = run_recommend(
            TINY, "--length", 512, "--budget", 1, "--samples", samples_file, "--folder", tmp_path
        )
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert result.returncode == 1
    assert f"another process works in {tmp_path}" in result.stderr


def test_a_length_and_a_budget_are_needed():
    assert run_recommend(TINY, "--minutes", 1).returncode == 2
    assert run_recommend(TINY, "--length", 512).returncode == 2
    assert "--minutes" in run_recommend("--help").stdout
