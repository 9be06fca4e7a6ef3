"""Test `rope-patch search`: output, files, continuation and refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.commands import run_in_new_process
from train_tiny import recall_batch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli import app
from rope_patch.searching.result.search_result import SearchResult
from rope_patch.searching.strategies.registry import STRATEGIES

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def run_search(*arguments):
    return CliRunner().invoke(app, ["search", *map(str, arguments)])


def write_samples(path, length, seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    rows = recall_batch(generator, count, length, pairs=4)
    lines = [
        json.dumps({"input_ids": ids, "labels": labels})
        for ids, labels in zip(*(row.tolist() for row in rows), strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return options with samples of the tiny model's trained task: recalling values of keys."""
    folder = tmp_path_factory.mktemp("samples")
    return [
        "--samples", write_samples(folder / "search.jsonl", 512, seed=1),
        "--held-out", write_samples(folder / "held-out.jsonl", 512, seed=2),
        "--short", write_samples(folder / "short.jsonl", 256, seed=3),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished_run(samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    out = folder / "out"
    words = [TINY, "--length", 512, "--strategy", "yarn-rcd", "--evaluations", 2, *samples]
    result = run_search(*words, "--out", out, "--picture", folder / "live.png")
    assert result.exit_code == 0, result.output
    return result, out, words


def test_the_result_is_printed_and_saved(finished_run):
    result, folder, _ = finished_run
    search_result = SearchResult.load(folder)
    assert result.stdout == f"{search_result}\n\n{folder / 'found.json'}\n"
    assert "from 256 to 512 tokens (×2): yarn-rcd, 3 evaluations" in result.stdout
    for label in ("found", "none", "yarn", "ntk", "linear", "against yarn"):
        assert f"\n  {label}" in result.stdout
    assert {"found.json", "config.json", "exports.json"} <= {p.name for p in folder.iterdir()}
    assert search_result.command.startswith("rope-patch")
    assert "_name_or_path" not in json.loads((folder / "config.json").read_text())
    assert [each["number"] for each in search_result.history] == [0, 1, 2]


def test_the_result_patches_and_plain_transformers_loads_it(finished_run):
    _, folder, _ = finished_run
    ids = torch.randint(5, 500, (1, 400), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(TINY)
    rope_patch.patch(model, "longrope", **SearchResult.load(folder))
    native = AutoModelForCausalLM.from_pretrained(TINY, config=AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, native(ids).logits, rtol=0, atol=2e-4)


def evaluate(folder, *arguments):
    words = ["eval", TINY, "--lengths", "320", "--tasks", "perplexity", "--window", "64"]
    return CliRunner().invoke(app, [*words, "--out", str(folder), *map(str, arguments)])


def test_the_result_is_evaluated_by_its_folder(finished_run, tmp_path):
    _, folder, _ = finished_run
    run = evaluate(tmp_path, "--method", f"none,yarn,{folder}", "--factor", 2)
    assert run.exit_code == 0, run.output
    methods = json.loads((tmp_path / "report.json").read_text())["methods"]
    assert [method["method"] for method in methods] == [None, "yarn", "longrope"]
    frequencies = methods[-1]["frequencies"]["all"]
    patch = json.loads((folder / "found.json").read_text())["patch"]
    stretch = [a / b for a, b in zip(frequencies["unscaled"], frequencies["inv_freq"], strict=True)]
    assert stretch == pytest.approx(patch["long_factor"], rel=1e-5)
    assert frequencies["attention_factor"] == pytest.approx(patch["attention_factor"])


def test_a_folder_without_a_result_and_two_of_longrope_are_refused(finished_run, tmp_path):
    _, folder, _ = finished_run
    for method, message in [
        (tmp_path, "found.json: expected what a search saved"),
        (f"{folder},longrope", "evaluate one at a time"),
        (f"{folder},{folder}", "evaluate one at a time"),
    ]:
        run = evaluate(tmp_path / "new", "--method", method)
        assert message in run.output
    assert not (tmp_path / "new").exists()


def test_another_trained_length_than_the_search_s_is_refused(finished_run, tmp_path):
    _, folder, _ = finished_run
    replace(SearchResult.load(folder), asked={"trained_length": 128}).save(tmp_path / "found")
    run = evaluate(tmp_path / "new", "--method", tmp_path / "found", "--trained-length", 256)
    assert "searched with trained_length 128: give --trained-length 128" in run.output


def test_pictures_of_the_search_and_the_result_are_written(finished_run):
    pytest.importorskip("matplotlib")
    _, folder, _ = finished_run
    assert "YaRN" in (folder / "picture.svg").read_text()
    assert (folder.parent / "live.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_measures_nothing_again(finished_run, tmp_path):
    _, folder, words = finished_run
    shutil.copytree(folder, tmp_path / "out")
    again = run_search(*words, "--out", tmp_path / "out", "--json")
    assert again.exit_code == 0
    output, before = json.loads(again.stdout), SearchResult.load(folder)
    assert output["history"] == before.to_dict()["history"]
    assert output["patch"] == before.to_dict()["patch"]


def test_help_names_every_strategy():
    result = run_search("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in STRATEGIES)
    assert "Examples:\n    rope-patch search demo --length 16384" in result.stdout


BAD = [
    ([TINY], "give exactly one of --length and --factor"),
    ([TINY, "--length", "512", "--factor", "2"], "give exactly one of --length and --factor"),
    ([TINY, "--length", "512", "--evaluations", "0"], "--evaluations must be at least 1"),
    ([TINY, "--length", "512", "--method", "longrop2"], "did you mean 'longrope2'?"),
    ([TINY, "--length", "512", "--fitness", "books"], "fitness must be one of needles"),
    ([TINY, "--length", "512", "--picture", "a.gif"], "an .svg or a .png file"),
    ([TINY, "--length", "512", "--dtype", "float8"], "dtype must be one of auto, float32"),
    ([TINY, "--length", "512", "--option", "steps=3"], "has no option 'steps': expected none"),
    (
        [TINY, "--length", "512", "--method", "longrope", "--option", "population=3"],
        "has no option 'population': expected start_tokens",
    ),
    ([TINY, "--length", "512", "--text", "no/such.txt"], "no text 'no/such.txt'"),
    ([TINY, "--length", "512", "--samples", "no.jsonl"], "give held_out as well"),
    (
        [TINY, "--length", "512", "--samples", "no.jsonl", "--held-out", "no2.jsonl"],
        "cannot read samples from no.jsonl",
    ),
    ([TINY, "--length", "512", "--held-out", "0"], "--held-out must be at least 1 sample"),
    ([TINY, "--length", "512", "--count", "0"], "--count must be at least 1 sample"),
    (["no/such/model", "--length", "512"], "no such folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_refused_and_leaves_no_file(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_search(*arguments)
    assert isinstance(result.exception, ValueError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_do_the_task_is_refused(tmp_path, monkeypatch):
    """The tiny model knows no English."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("It was a text of no use, but it was not short. " * 300)
    words = ["--length", 1500, "--trained-length", 1000, "--text", "text.txt"]
    result = run_search(TINY, *words, "--count", 1, "--held-out", 1)
    assert "cannot find needles at its own trained length of 1,000" in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_a_short_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("It was a short text. " * 20)
    result = run_search(TINY, "--length", 512, "--text", "text.txt")
    assert "512 are needed: give a longer one or a shorter length" in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_a_folder_of_another_search_is_refused_and_left_unchanged(finished_run, tmp_path):
    _, folder, words = finished_run
    shutil.copytree(folder, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    result = run_search(*words, "--out", tmp_path / "out", "--seed", 7)
    assert "is the state of another search: seed is 42 there and 7 here" in str(result.exception)
    (tmp_path / "file").touch()
    result = run_search(*words, "--out", tmp_path / "file")
    assert "is a file: expected a folder" in str(result.exception)
    after = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
def test_stderr_has_no_line_per_patch(samples, tmp_path):
    words = [TINY, "--length", 512, "--strategy", "ntk-rcd", "--evaluations", 1, *samples]
    process = run_in_new_process("search", *words, "--out", tmp_path / "out", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "patched" not in process.stderr
    assert process.stdout.endswith(f"{tmp_path / 'out' / 'found.json'}\n")


def test_a_refusal_is_one_line_and_exit_code_1(tmp_path):
    process = run_in_new_process("search", TINY, "--length", 512, "--evaluations", 0, cwd=tmp_path)
    assert process.returncode == 1
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert lines == ["error: --evaluations must be at least 1 candidate to measure, got 0"]
    assert not list(tmp_path.iterdir())
