"""The command line as a user meets it: what is printed, and the exit code."""

import json
from pathlib import Path

import pytest
from commands import here, typed

import rope_patch

TINY = str(Path(__file__).parent / "assets" / "tiny-llama")


def test_methods_are_listed_with_paper_and_need_for_training():
    rows = json.loads(here("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(rope_patch.methods())
    printed = here("methods").stdout
    assert all(row["description"] in printed and row["paper"] in printed for row in rows)
    assert "beta_fast (default: 32.0)" in here("methods", "yarn").stdout


def test_diagnose_prints_a_row_for_every_pair():
    printed = here("diagnose", TINY, "--method", "yarn", "--factor", "4").stdout
    assert "critical dimension" in printed
    rows = [line.split() for line in printed.splitlines() if line[:4].strip().isdigit()]
    assert [row[0] for row in rows] == [str(pair) for pair in range(16)]
    assert all(row[3].startswith("×") for row in rows)
    data = json.loads(here("diagnose", TINY, "--length", "1024", "--json").stdout)
    assert len(data["rotations"]["all"]["pairs"]) == 16


def test_eval_writes_a_report_and_says_where(tmp_path):
    done = typed(
        *("eval", TINY, "--method", "none,yarn", "--factor", "4", "--lengths", "512"),
        *("--depths", "50", "--report", "out"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out/report.html\n"
    assert "yarn ×4, 256 → 1,024 tokens" in done.stderr
    assert "perplexity" in done.stderr  # the progress bars
    again = typed(
        *("eval", TINY, "--method", "none,yarn", "--factor", "4", "--lengths", "512"),
        *("--depths", "50", "--report", "out", "--json"),
        cwd=tmp_path,
    )
    assert json.loads(again.stdout) == json.loads((tmp_path / "out" / "report.json").read_text())
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("command", [(), ("methods",), ("diagnose",), ("eval",)])
def test_help_teaches(command):
    done = here(*command, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout or not command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("methods", "yran"), "did you mean 'yarn'"),
        (("diagnose", "/no/such"), "no such folder: /no/such"),
        (("diagnose", TINY, "--option", "beta_fast"), "--option takes KEY=VALUE"),
        (("diagnose", TINY, "--factor", "0.5"), "factor must be at least 1"),
        (
            ("eval", TINY, "--method", "yarn", "--lengths", "many"),
            "--lengths must be whole numbers",
        ),
        (("eval", TINY, "--method", "yarn"), "exactly one of factor and length"),
    ],
)
def test_failures_are_one_clear_line_and_a_non_zero_exit(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = here(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_process_fails_as_quietly(tmp_path):
    done = typed("diagnose", TINY, "--factor", "0.5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: factor must be at least 1")
