"""Test `rope-patch search`: output, files, continuation and refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from helpers.search_fixtures import questions, write_samples

from rope_patch.searching import STRATEGIES, SearchResult

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run_search(*arguments):
    return run_in_this_process("search", *arguments)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Search on samples of the tiny model's trained task: recalling values of keys."""
    folder = tmp_path_factory.mktemp("run")
    words = []
    for seed, (option, length) in enumerate(
        [("--samples", 512), ("--held-out", 512), ("--short", 256)]
    ):
        words += [option, write_samples(folder / option, questions(length, 2, seed, pairs=4))]
    out = folder / "out"
    words += ["--length", 512, "--strategy", "yarn-rcd", "--evaluations", 2, "--out", out]
    result = run_search(TINY, *words, "--picture", folder / "live.png")
    assert result.returncode == 0, result.stderr
    return result, out, run_search(TINY, *words, "--json")


def test_the_result_is_printed_and_saved(finished_run):
    result, folder, again = finished_run
    search_result = SearchResult.load(folder)
    assert result.stdout == f"{search_result}\n\n{folder / 'found.json'}\n"
    assert "from 256 to 512 tokens (×2): yarn-rcd, 3 evaluations" in result.stdout
    for label in ("found", "none", "yarn", "ntk", "linear", "against yarn"):
        assert f"\n  {label}" in result.stdout
    assert {"found.json", "config.json", "exports.json"} <= {p.name for p in folder.iterdir()}
    assert search_result.command.startswith("rope-patch")
    assert "_name_or_path" not in json.loads((folder / "config.json").read_text())
    assert [each["number"] for each in search_result.history] == [0, 1, 2]
    assert "patched" not in result.stderr  # no line for each candidate
    assert json.loads(again.stdout)["history"] == search_result.to_dict()["history"]
    assert json.loads(again.stdout)["patch"] == search_result.to_dict()["patch"]


def test_pictures_of_the_search_and_the_result_are_written(finished_run):
    pytest.importorskip("matplotlib")
    _, folder, _ = finished_run
    assert "YaRN" in (folder / "picture.svg").read_text()
    assert (folder.parent / "live.png").read_bytes().startswith(b"\x89PNG")


def evaluate(folder, *arguments):
    words = ["eval", TINY, "--lengths", "320", "--tasks", "perplexity", "--window", "64"]
    return run_in_this_process(*words, "--out", folder, *arguments)


@pytest.mark.usefixtures("never_drawn")
def test_the_result_is_evaluated_by_its_folder(finished_run, tmp_path):
    _, folder, _ = finished_run
    run = evaluate(tmp_path, "--method", f"none,{folder}", "--factor", 2)
    assert run.returncode == 0, run.stderr
    methods = json.loads((tmp_path / "report.json").read_text())["methods"]
    assert [method["method"] for method in methods] == [None, "longrope"]
    frequencies = methods[-1]["frequencies"]["all"]
    patch = json.loads((folder / "found.json").read_text())["patch"]
    stretch = [a / b for a, b in zip(frequencies["unscaled"], frequencies["inv_freq"], strict=True)]
    assert stretch == pytest.approx(patch["long_factor"], rel=1e-5)
    assert frequencies["attention_factor"] == pytest.approx(patch["attention_factor"])


def test_an_evaluation_of_a_result_that_cannot_be_had_is_refused(finished_run, tmp_path):
    _, folder, _ = finished_run
    (tmp_path / "empty").mkdir()
    replace(SearchResult.load(folder), asked={"trained_length": 128}).save(tmp_path / "found")
    for method, fact, options in [
        (tmp_path / "empty", "found.json", []),
        (f"{folder},longrope", "one at a time", []),
        (f"{folder},{folder}", "one at a time", []),
        (tmp_path / "found", "--trained-length 128", ["--trained-length", 256]),
    ]:
        run = evaluate(tmp_path / "new", "--method", method, *options)
        assert run.returncode != 0
        assert fact in run.stderr
    assert not (tmp_path / "new").exists()


def test_help_names_every_strategy():
    text = run_search("--help").stdout
    assert all(name in text for name in STRATEGIES)
    assert "rope-patch search demo --length 16384" in text


SIZE = ["--length", "512"]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ([TINY], "--length and --factor"),
        ([TINY, *SIZE, "--evaluations", "0"], "--evaluations must be at least 1"),
        ([TINY, *SIZE, "--method", "longrop2"], "did you mean 'longrope2'?"),
        ([TINY, *SIZE, "--picture", "a.gif"], ".svg"),
        ([TINY, *SIZE, "--dtype", "float8"], "float32"),
        ([TINY, *SIZE, "--option", "steps=3"], "'steps'"),
        ([TINY, *SIZE, "--text", "no/such.txt"], "no/such.txt"),
        ([TINY, *SIZE, "--text", "short.txt"], "512 are needed"),
        ([TINY, *SIZE, "--samples", "no.jsonl", "--held-out", "no2.jsonl"], "no.jsonl"),
        ([TINY, *SIZE, "--held-out", "0"], "--held-out must be at least 1"),
        ([TINY, *SIZE, "--count", "0"], "--count must be at least 1"),
        (["no/such/model", *SIZE], "no such folder"),
        ([TINY, *SIZE, "--out", "short.txt"], "expected a folder"),
    ],
)
def test_bad_input_is_one_error_line_and_leaves_no_file(arguments, fact, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("It was a short text. " * 20)
    result = run_search(*arguments)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert fact in line
    assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]
