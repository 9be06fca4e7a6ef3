"""Test `rope-patch recommend`: output, files, continuation and refusals."""

import json
from pathlib import Path

import pytest
from helpers.commands import run_in_new_process
from helpers.search_fixtures import questions
from typer.testing import CliRunner

from rope_patch.cli import app
from rope_patch.utils.folder_lock import lock_folder
from rope_patch.utils.processes import Processes

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run_recommend(*arguments):
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)])


@pytest.fixture(scope="module")
def samples_file(tmp_path_factory):
    """Return a file of samples of two lengths in the format of training data."""
    lines = []
    for sample in questions(512, 6, seed=3) + questions(256, 6, seed=2):
        labels = [-100] * len(sample.ids)
        for position in sample.positions:
            labels[position] = sample.ids[position]
        lines.append(json.dumps({"input_ids": sample.ids, "labels": labels}))
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def finished_runs(samples_file, tmp_path_factory):
    """Run the same command twice; return the folder and both results."""
    folder = tmp_path_factory.mktemp("run")
    arguments = ["--length", 512, "--minutes", 30, "--samples", samples_file, "--out", "out"]
    first = run_in_new_process("recommend", TINY, *arguments, cwd=folder)
    second = run_in_new_process("recommend", TINY, *arguments, "--json", cwd=folder)
    return folder, first, second


def test_the_verdict_is_printed_and_written(finished_runs):
    folder, first, _ = finished_runs
    assert first.returncode == 0, first.stderr
    recommendation = json.loads((folder / "out" / "recommendation.json").read_text())
    assert recommendation["outcome"] == "use"
    assert recommendation["verdict"] in first.stdout
    assert recommendation["python"] in first.stdout
    assert first.stdout.endswith(f"\n\n{Path('out') / 'recommendation.md'}\n")
    assert recommendation["shell"].startswith(f"rope-patch export {TINY} --engine")
    page = (folder / "out" / "recommendation.md").read_text()
    assert recommendation["verdict"] in page
    assert "rope-patch recommend" in page
    assert "s for a sample of 512 tokens" in first.stderr
    assert "\r" not in first.stderr  # no progress bars in a log
    assert "a search: it needs samples of its own" in first.stdout


def test_the_recommended_export_command_runs(finished_runs):
    folder, _, _ = finished_runs
    recommendation = json.loads((folder / "out" / "recommendation.json").read_text())
    words = recommendation["shell"].split()
    result = CliRunner().invoke(app, [*words[1:], "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["engine"] in recommendation["shell"]


def test_the_same_command_measures_nothing_again(finished_runs):
    folder, first, second = finished_runs
    assert second.returncode == 0, second.stderr
    recommendation = json.loads(second.stdout)
    assert recommendation["verdict"] in first.stdout
    lines = (folder / "out" / "state.jsonl").read_text().splitlines()[1:]
    keys = [key for line in lines if (key := json.loads(line)["key"]) != "clock"]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", 512, "--minutes", 0], "more than 0 minutes"),
        (["--length", 512, "--minutes", 0.00001], "the budget is too small"),
        (["--length", 100, "--minutes", 1], "trained"),
        (
            ["--length", 512, "--minutes", 1, "--dtype", "int8"],
            "dtype must be one of auto",
        ),
        (["--length", 512, "--minutes", 1, "--samples", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_error_line(samples_file, tmp_path, arguments, message):
    sample_options = [] if "--samples" in arguments else ["--samples", samples_file]
    result = run_recommend(TINY, *arguments, *sample_options, "--out", tmp_path / "out")
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_second_run_in_a_folder_is_refused(samples_file, tmp_path):
    with lock_folder(tmp_path, Processes()):
        result = run_recommend(
            TINY, "--length", 512, "--budget", 1, "--samples", samples_file, "--folder", tmp_path
        )
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert result.exit_code != 0
    assert f"another process works in {tmp_path}: wait for it to end" in str(result.exception)


def test_a_length_and_a_budget_are_needed():
    assert run_recommend(TINY, "--minutes", 1).exit_code == 2
    assert run_recommend(TINY, "--length", 512).exit_code == 2
    assert "--minutes" in run_recommend("--help").output
