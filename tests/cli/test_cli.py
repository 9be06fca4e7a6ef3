"""Test the command line as users run it: output, help, verbosity and whole processes."""

import json
import logging
import os
import re
import runpy
import subprocess
import sys
from importlib import metadata

import pytest
from helpers.commands import run_in_new_interpreter, run_in_new_process, run_in_this_process
from helpers.evaluations import TEXT, TINY

import rope_patch
from rope_patch.methods import ENCODING_METHODS


def test_methods_are_listed_with_options_paper_and_need_for_fine_tuning():
    rows = json.loads(run_in_this_process("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(rope_patch.list_methods())
    rotary, others, hint = run_in_this_process("methods").stdout.split("\n\n")
    lines = rotary.splitlines()
    assert [line.split()[0] for line in lines] == list(rope_patch.list_methods())
    assert all(line.endswith(row["description"]) for line, row in zip(lines, rows, strict=True))
    assert "NAME" in hint
    assert [line.split()[0] for line in others.splitlines()[1:]] == list(ENCODING_METHODS)
    assert "T5" in run_in_this_process("methods", "log-tail").stdout
    output = run_in_this_process("methods", "yarn").stdout
    assert "beta_fast (default: 32.0)" in output
    assert "arXiv:2309.00071; fine-tuning: not needed, but helps" in output


def test_eval_writes_a_report_and_prints_its_path(tmp_path, monkeypatch):
    words = ("eval", TINY, "--method", "none,yarn", "--factor", "4", "--lengths", "512")
    words = (*words, "--depths", "50", "--samples", "2", "--text", TEXT)
    result = run_in_new_interpreter(*words, "--out", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    title, verdict, _ = result.stdout.split("\n", 2)
    page = (tmp_path / "out" / "report.md").read_text()
    assert title in page
    assert verdict in page.replace("\\", "")
    summary = {line.split("  ")[1]: line for line in result.stdout.splitlines() if line[:2] == "  "}
    assert summary.keys() - {""} == {"method", "plain model", "yarn ×4"}
    assert max(map(len, summary.values())) <= 100
    cells = next(line for line in page.splitlines() if line.startswith("| yarn ×4 |")).split(" | ")
    assert all(cell.strip(" |") in summary["yarn ×4"] for cell in cells[:2])
    assert result.stdout.endswith("\n\nout/report.html\n")
    assert "yarn ×4, 256 → 1,024 tokens" in result.stderr
    assert "\r" not in result.stderr  # no progress bars in a log, neither ours nor the libraries'
    assert all(result.stderr.splitlines())
    monkeypatch.chdir(tmp_path)
    repeated = run_in_this_process(*words, "--report", "out", "--json", "-q")
    assert json.loads(repeated.stdout) == json.loads((tmp_path / "out" / "report.json").read_text())
    assert repeated.stderr == ""
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_a_failing_process_prints_one_error_line(tmp_path):
    result = run_in_new_process("methods", "yarm", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "yarn" in line


@pytest.mark.parametrize("command", ["", "methods", "diagnose", "eval", "env", "bench"])
def test_help_has_examples(command):
    result = run_in_this_process(*command.split(), "--help")
    assert result.returncode == 0
    assert "Examples:" in result.stdout or not command


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("eval x --methods none --report o --lengths many", "tokens such as"),
        ("compare x --methods=none --report=o --lengths many", "tokens such as"),
        ("bench --methods none", "--method needs a MODEL"),
        ("search x --method m --budget many", "'--evaluations'"),
        (f"search x --folder {__file__}", f"--out {__file__} is a file"),
        ("recommend x --length 9 --folder o --budget many", "'--minutes'"),
        ("patch x --factor 4 --to new", "'--method'"),
    ],
)
def test_aliases_of_options_work_and_missing_options_are_named(words, fact):
    result = run_in_this_process(*words.split())
    assert result.returncode
    assert fact in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(("words", "code"), [("methods", 0), ("--help", 0), ("recipes no", 1)])
def test_output_that_nobody_reads_ends_in_silence(words, code):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from rope_patch.cli import main; main()", *words.split()]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert result.returncode == code
    assert result.stderr.count("\n") == code  # the refusal alone


def test_help_has_options_in_groups_and_one_spelling_of_usage():
    text = run_in_this_process("compare", "--help").stdout
    assert text.startswith("Usage: rope-patch compare [OPTIONS] MODEL [OTHER]\n")
    sections = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert sections[:3] == [
        "Arguments:",
        "Options:",
        "How many retrieval samples are taken, and where their answers stand:",
    ]
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)
    assert len(options) == len(set(options))
    assert {"--factor", "--precision", "--dtype", "--tokenizer", "--help"} <= set(options)


def test_only_public_names_are_offered():
    assert set(dir(rope_patch)) == {*rope_patch.__all__, "__version__"}


def test_tasks_are_a_line_each_and_slips_are_answered():
    lines = run_in_this_process("tasks").stdout.splitlines()
    by_name = {line.split()[0]: line for line in lines if line}
    assert by_name["rp_niah_single_2"].endswith(" _ll      A 7-digit number in a novel")
    assert {name for name in by_name if name.startswith("rp_vt")} == {"rp_vt"}
    assert run_in_this_process("tasks", "rp_vt").stdout.startswith("rp_vt  Which five variables")
    slip = run_in_this_process("tasks", "rp_niah_singel_2")
    assert (slip.returncode, slip.stdout) == (1, "")
    assert "did you mean 'rp_niah_single_2'?" in slip.stderr


def test_out_sets_the_output_folder_of_a_recipe(monkeypatch):
    arguments = []
    monkeypatch.setattr("rope_patch.training.trainer.main", arguments.extend)
    words = ("finetune", "--config", "smoke_cpu", "--out", "here", "--seed", "1")
    assert run_in_this_process(*words).returncode == 0
    assert arguments == ["--config", "smoke_cpu", "--output_dir", "here", "--seed", "1"]


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("methods --json", logging.INFO),
        ("-v methods --json", logging.DEBUG),
        ("methods --json --verbose", logging.DEBUG),
        ("-q methods --json", logging.ERROR),
        ("methods --json yarn -q", logging.ERROR),
    ],
)
def test_verbosity_options_work_before_and_after_the_command(words, level, monkeypatch):
    logger, levels = logging.getLogger("rope_patch"), []
    before = logger.level
    monkeypatch.setattr(json, "dumps", lambda *_, **__: levels.append(logger.level))
    assert run_in_this_process(*words.split()).returncode == 0
    assert (levels, logger.level) == ([level], before)


def test_the_version_and_the_environment_are_printed():
    version = rope_patch.__version__
    assert run_in_this_process("--version").stdout == f"rope-patch {version}\n"
    facts = json.loads(run_in_this_process("env", "--json").stdout)
    assert (facts["rope-patch"], facts["torch"]) == (version, metadata.version("torch"))
    output = run_in_this_process("env").stdout
    assert all(f"{name} " in output and value in output for name, value in facts.items())


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["rope-patch", "methods", "yarn"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("rope_patch", run_name="__main__")
    assert not exit_info.value.code
    assert capsys.readouterr().out.startswith("yarn ")
