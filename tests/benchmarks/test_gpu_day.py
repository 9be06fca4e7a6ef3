"""Test the day on a GPU: real steps of a moment each; the whole dry run is slow."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rope_patch.benchmarks import CUT, DONE, FAILED, REAL, TO_DO, Day, Step, day_steps

ROOT = Path(__file__).parents[2]
CARD = {"device": "a card"}


def step(name, *codes, seconds=20, **others):
    """Return a step that runs Python's code."""
    commands = tuple(("-c", code) for code in codes)
    return Step(
        name=name, about=f"what {name} decides", seconds=seconds, commands=commands, **others
    )


def append(path, text):
    """Return code that appends to a file."""
    return f"open({str(path)!r}, 'a').write({text!r})"


def states(day):
    return {name: day.state(each) for name, each in day.steps.items()}


def test_steps_run_in_order_and_finished_commands_once(tmp_path):
    log, gate = tmp_path / "log", tmp_path / "gate"
    fails_once = f"import pathlib, sys; sys.exit(not pathlib.Path({str(gate)!r}).exists())"
    steps = [
        step("first", append(log, "a"), fails_once, append(log, "b")),
        step("second", append(log, "c"), needs=("first",)),
        step("third", append(log, "d")),
    ]
    out = tmp_path / "out"
    day = Day(out, steps, CARD)
    assert "first" in day.plan()
    assert not out.exists()  # a plan writes nothing
    day.run(60)
    assert log.read_text() == "ad"
    assert states(day) == {"first": FAILED, "second": TO_DO, "third": DONE}
    assert day.obstacle(day.steps["second"]) == "waits for first"
    gate.touch()
    Day(out, steps, CARD).run(60)
    assert log.read_text() == "adbc"
    assert set(states(day).values()) == {DONE}
    assert "Nothing is left" in day.plan()
    Day(out, steps, CARD).run(60)
    assert log.read_text() == "adbc"


def test_a_changed_command_runs_again(tmp_path):
    log = tmp_path / "log"
    for text in "aab":
        Day(tmp_path / "out", [step("only", append(log, text))], CARD).run(60)
    assert log.read_text() == "ab"


def test_a_step_is_interrupted_before_its_bound_and_goes_on(tmp_path):
    """The command writes what it has when it is interrupted, as the commands of a day do."""
    log = tmp_path / "log"
    code = (
        f"import pathlib, time\nlog = pathlib.Path({str(log)!r})\n"
        "if log.exists(): raise SystemExit\n"
        "try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    log.write_text('kept')"
    )
    day = Day(tmp_path / "out", [step("long", code, seconds=3)], CARD)
    start = time.monotonic()
    day.run(60)
    assert time.monotonic() - start < 20
    assert (log.read_text(), states(day)) == ("kept", {"long": CUT})
    day.run(60)
    assert states(day) == {"long": DONE}


def test_what_ignores_an_interruption_is_killed_with_its_children(tmp_path):
    beat = tmp_path / "beat"
    child = f"import time\nwhile True: {append(beat, '.')}; time.sleep(0.05)"
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(100)"
    )
    day = Day(tmp_path / "out", [step("stubborn", code, seconds=3)], CARD)
    day.run(60)
    assert states(day) == {"stubborn": CUT}
    size = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == size


def test_no_step_begins_that_does_not_fit(tmp_path, capsys):
    steps = [step("long", "1", seconds=300), step("short", "1", seconds=20)]
    day = Day(tmp_path / "out", steps, CARD)
    day.run(60)
    assert states(day) == {"long": TO_DO, "short": DONE}
    assert "long: not begun" in capsys.readouterr().out
    plan = day.plan()
    assert "5 min 00 s" in plan
    assert "python -c 1" in plan


def test_a_folder_says_what_made_it(tmp_path):
    steps = [step("one", "print('a result')"), step("two", "1", missing="no files")]
    Day(tmp_path, steps, CARD).run(60)
    assert (tmp_path / "one" / "output-1.txt").read_text() == "a result\n"
    (line,) = (tmp_path / "one" / "step.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry["command"] == ["-c", "print('a result')"]
    assert entry["device"] == "a card"
    assert entry["versions"]["torch"]
    page = (tmp_path / "README.md").read_text()
    assert "A day on a card" in page
    assert "no files" in page
    assert not (tmp_path / "two").exists()


def test_refusals_name_what_was_expected(tmp_path):
    day = Day(tmp_path, [step("one", "1")], CARD)
    with pytest.raises(ValueError, match=r"'tow'.*one"):
        day.run(60, ["tow"])
    day.run(60)
    with pytest.raises(ValueError, match=r"a card.*another"):
        Day(tmp_path, [step("one", "1")], {"device": "another"}).run(60)


def test_the_documented_commands_hold_all_steps():
    page = (ROOT / "docs" / "contributing.md").read_text()
    rows = re.findall(r"\| `make gpu MINUTES=4 ONLY=(\S+)` \| (\d+) \|", page)
    steps = {step.name: step for step in day_steps(Path("out"), REAL)}
    assert sorted(name for names, _ in rows for name in names.split(",")) == sorted(steps)
    for names, bound in rows:
        assert sum(steps[name].seconds for name in names.split(",")) == int(bound) < 240


def run_day(*words):
    return subprocess.run(
        [sys.executable, "-m", "rope_patch.benchmarks", "gpu", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def test_without_a_gpu_the_plan_is_shown_and_nothing_runs(tmp_path):
    refused = run_day("--out", tmp_path / "out")
    assert refused.returncode == 1
    assert "--dry-run" in refused.stderr
    assert "Traceback" not in refused.stderr
    plan = run_day("--plan", "--out", tmp_path / "out")
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.index("| questions |") < plan.stdout.index("| rotation |")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_step_runs_in_little(tmp_path):
    out = tmp_path / "out"
    result = run_day("--dry-run", "--minutes", 60, "--out", out)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing is left" in result.stdout
    assert (out / "questions" / "report.json").is_file()
    assert (out / "tuned-questions" / "both" / "report.json").is_file()
    compiled = json.loads((out / "compiled" / "compiled.json").read_text())
    measured = {(row["method"], row["mode"]) for row in compiled["rows"] if "ms" in row}
    methods = ("none", "yarn", "dynamic-yarn")
    assert measured == {(name, mode) for name in methods for mode in ("eager", "compiled")}
    training = json.loads((out / "training-step" / "training-step.json").read_text())
    assert all(0.5 < row["planned_over_peak"] < 2 for row in training["rows"])
