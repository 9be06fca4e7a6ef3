"""`rope-patch recommend`: what it prints and writes, that it goes on, and how it fails."""

import json
from pathlib import Path

import pytest
from helpers.commands import typed
from helpers.search_fixtures import questions
from typer.testing import CliRunner

from rope_patch.cli import app
from rope_patch.utils.folder_lock import lock_folder
from rope_patch.utils.processes import Processes

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run(*arguments):
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Questions of two lengths, as training data has them."""
    lines = []
    for sample in questions(512, 6, seed=1) + questions(256, 6, seed=2):
        labels = [-100] * len(sample.ids)
        for position in sample.positions:
            labels[position] = sample.ids[position]
        lines.append(json.dumps({"input_ids": sample.ids, "labels": labels}))
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def done(file, tmp_path_factory):
    """The same command twice."""
    folder = tmp_path_factory.mktemp("run")
    arguments = ["--length", 512, "--minutes", 30, "--samples", file, "--out", "out"]
    first = typed("recommend", TINY, *arguments, cwd=folder)
    second = typed("recommend", TINY, *arguments, "--json", cwd=folder)
    return folder, first, second


def test_it_prints_the_verdict_and_writes_it(done):
    folder, first, _ = done
    assert first.returncode == 0, first.stderr
    said = json.loads((folder / "out" / "recommendation.json").read_text())
    assert said["outcome"] == "use"
    assert said["verdict"] in first.stdout
    assert said["python"] in first.stdout
    assert first.stdout.endswith(f"\n\n{Path('out') / 'recommendation.md'}\n")
    assert said["shell"].startswith(f"rope-patch export {TINY} --engine")
    page = (folder / "out" / "recommendation.md").read_text()
    assert said["verdict"] in page
    assert "rope-patch recommend" in page
    assert "s for a sample of 512 tokens" in first.stderr
    assert "\r" not in first.stderr  # no progress bars in a log
    assert "a search: it needs samples of its own" in first.stdout


def test_the_line_for_engines_works(done):
    folder, _, _ = done
    said = json.loads((folder / "out" / "recommendation.json").read_text())
    words = said["shell"].split()
    printed = CliRunner().invoke(app, [*words[1:], "--json"])
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout)["engine"] in said["shell"]


def test_the_same_command_goes_on(done):
    folder, first, second = done
    assert second.returncode == 0, second.stderr
    again = json.loads(second.stdout)
    assert again["verdict"] in first.stdout
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
def test_what_is_wrong_is_one_line(file, tmp_path, arguments, message):
    given = [] if "--samples" in arguments else ["--samples", file]
    found = run(TINY, *arguments, *given, "--out", tmp_path / "out")
    assert found.exit_code != 0
    assert message in str(found.exception)
    assert "\n" not in str(found.exception)


def test_a_second_run_in_a_folder_is_refused(file, tmp_path):
    with lock_folder(tmp_path, Processes()):
        found = run(TINY, "--length", 512, "--budget", 1, "--samples", file, "--folder", tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert found.exit_code != 0
    assert f"another process works in {tmp_path}: wait for it to end" in str(found.exception)


def test_a_length_and_a_budget_are_needed():
    assert run(TINY, "--minutes", 1).exit_code == 2
    assert run(TINY, "--length", 512).exit_code == 2
    assert "--minutes" in run("--help").output
