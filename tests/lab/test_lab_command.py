"""Test `rope-patch lab`: its report, that it continues, its errors, and the published run."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process
from helpers.schema import problems
from helpers.undrawn import leave_undrawn

from rope_patch.lab import LabRecord, LabResults, write_report

WORDS = ("lab", "--encodings", "none,learned", "--length", "32", "--test", "32,64")
WORDS = (*WORDS, "--steps", "text=4,recall=1", "--processes", "1")
SCRIPT = Path(__file__).parents[2] / "docs" / "generate" / "lab.py"


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the figures of later reports undrawn."""
    leave_undrawn(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    result = run_in_this_process(*WORDS, "--out", folder)
    assert result.returncode == 0, result.stderr
    (folder / "stdout").write_text(result.stdout)
    return folder


def test_the_report_is_one_page_in_light_and_dark(folder):
    page = (folder / "report.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 4  # two figures, wide and narrow
    assert not re.search(r'(src|href)="(?!#|https://arxiv)', page)
    assert "no rows" in page
    for arxiv in ("2108.12409", "2305.19466", "2203.16634", "2310.13017", "2404.12224"):
        assert arxiv in page
    assert "One seed" in page


def test_numbers_of_the_page_are_those_of_the_json(folder):
    results = LabResults.load(folder / "report.json").results
    cells = {(c["cell"]["task"], c["cell"]["encoding"]): c for c in results["cells"]}
    assert cells.keys() == {(t, e) for t in ("text", "recall") for e in ("none", "learned")}
    score = cells["text", "none"]["scores"][0]
    assert (score["method"], score["length"], len(score["loss"])) == ("plain", 32, 16)
    mean = f"{sum(score['loss']) / 16:.2f}"
    page = (folder / "report.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| none |"))
    assert row.split(" | ")[1].startswith(mean)
    assert mean in (folder / "stdout").read_text()


def test_the_json_is_what_the_schema_says_and_other_files_are_refused(folder, tmp_path):
    path = folder / "report.json"
    assert list(problems(LabResults.load(path).results, LabRecord)) == []
    other = tmp_path / "report.json"
    other.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1', 1))
    with pytest.raises(ValueError, match="digest"):
        LabResults.load(other)
    other.write_text("{}")
    with pytest.raises(ValueError, match="rope-patch lab"):
        LabResults.load(other)
    result = run_in_this_process("report", folder, "--out", tmp_path / "out")
    assert result.returncode != 0
    assert "rope-patch eval" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_same_command_trains_nothing_again_and_more_encodings_add_to_it(folder):
    journal = folder / "cells.jsonl"
    before = journal.read_bytes()
    again = run_in_this_process(*WORDS, "--out", folder, "--json")
    assert journal.read_bytes() == before
    assert len(json.loads(again.stdout)["cells"]) == 4
    more = [word.replace("none,learned", "none,learned,rope") for word in WORDS]
    result = run_in_this_process(*more, "--tasks", "text", "--out", folder, "--json")
    encodings = [c["cell"]["encoding"] for c in json.loads(result.stdout)["cells"]]
    assert encodings == ["none", "learned", "rope"]
    assert journal.read_bytes().startswith(before)
    assert journal.read_bytes().count(b"\n") == 5


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_line_of_the_journal_is_trained_again(folder):
    journal = folder / "cells.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"loss": [', b'"loss": [9.0, ', 1)
    journal.write_bytes(b"".join(lines))
    run_in_this_process(*WORDS, "--tasks", "text", "--out", folder)
    assert journal.read_bytes().count(b"\n") == len(lines) + 1


@pytest.mark.usefixtures("undrawn")
def test_quick_leaves_what_is_named(tmp_path):
    words = ("lab", "--quick", "--tasks", "recall", "--encodings", "none", "--steps", "1")
    words = (*words, "--length", "32", "--test", "32,64", "--processes", "1", "--json")
    result = run_in_this_process(*words, "--out", tmp_path / "lab")
    assert result.returncode == 0, result.stderr
    assert [c["cell"]["task"] for c in json.loads(result.stdout)["cells"]] == ["recall"]


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--encodings", "alibbi"), "'alibi'"),
        (("--encodings", ","), "encodings"),
        (("--tasks", "texts"), "text"),
        (("--length", "8"), "at least 32"),
        (("--length", "0"), "at least 32"),
        (("--test", "64,32"), "256"),
        (("--test", "512"), "256"),
        (("--test", "a"), "--test"),
        (("--steps", "fast"), "--steps"),
        (("--steps", "text=0"), "text_steps"),
        (("--seeds", "0"), "--seeds"),
        (("--processes", "0"), "--processes"),
        (("--length", "100000"), "fewer excerpts"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, words, fact):
    result = run_in_this_process("lab", *words, "--out", tmp_path / "out")
    assert result.returncode != 0
    assert fact in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_in_one_line(tmp_path):
    words = ("lab", "--encodings", "none,rope", "--tasks", "text", "--length", "32", "--test", "32")
    process = subprocess.Popen(
        [sys.executable, "-m", "rope_patch", *words, "--steps", "5000", "--processes", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("out/lab/checkpoints/*.pt"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "stopped; the same command continues from here"
    assert "Traceback" not in stderr


# -- the published run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("lab_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(script):
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.build(page), (
        "docs/lab.md is not what eval/results/lab holds: run python docs/generate/lab.py and look "
        "at what changed"
    )


@pytest.mark.usefixtures("undrawn")
def test_published_report_is_rendered_from_its_own_json(script, tmp_path):
    results = LabResults.load(script.RESULTS / "report.json").results
    write_report(results, tmp_path)
    assert LabResults.load(tmp_path / "report.json").results == results
    published = (script.RESULTS / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == published
