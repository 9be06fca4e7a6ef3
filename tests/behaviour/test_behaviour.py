"""Test that two records of a revision are alike, and that each kind of difference is printed."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from behaviour import recording
from behaviour.comparing import canonical, compare
from behaviour.recording import record

JOBS = ("lists", "frequencies")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(recording, "WORK", folder / "work")
        for name in ("a", "b"):
            record(folder / name, only=JOBS)
    return folder / "a", folder / "b"


@pytest.fixture
def changed(records, tmp_path):
    return Path(shutil.copytree(records[1], tmp_path / "changed"))


def test_two_records_of_a_revision_are_alike(records, capsys):
    assert (
        (records[0] / "cases" / "lists" / "01.txt").read_text().startswith("$ rope-patch tasks\n")
    )
    assert compare(*records) == 0
    assert capsys.readouterr().out.startswith("0 of ")


def test_a_word_an_exit_code_and_a_missing_file_are_printed(records, changed, capsys):
    path = changed / "cases/lists/02.txt"
    path.write_text(path.read_text().replace("exit code 0", "exit code 1"))
    path = changed / "cases/lists/03.txt"
    path.write_text(path.read_text().replace("method: yarn", "method: ntk"))
    (changed / "cases/lists/04.txt").unlink()
    assert compare(records[0], changed) == 1
    printed = capsys.readouterr().out
    for line in ("$ rope-patch recipes", "-exit code 0", "+exit code 1", "+method: ntk"):
        assert f"\n  {line}" in printed
    assert f"cases/lists/04.txt\n  only in {records[0]}\n" in printed
    assert "\n3 of " in printed


def test_tensors_are_equal_or_within_the_tolerance(records, changed, capsys):
    path = changed / "numbers/frequencies.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("yarn "))
    tensors[name][-1] += 1e-6
    save_file(tensors, path)
    assert compare(records[0], changed) == 1
    assert f"{name}: differs by up to 1e-06" in capsys.readouterr().out
    assert compare(records[0], changed, tolerance=1e-5) == 0


def test_durations_and_orders_of_json_are_no_difference():
    first, second = (
        "$ rope-patch x\nexit code 0\n-- stdout\n" + json.dumps(values) + "\n\n-- stderr\n" + text
        for values, text in (
            ({"seconds": {"all": 1.5}, "a": 1, "b": [2]}, "step 1 done in 3.1 s\n"),
            ({"b": [2], "a": 1, "seconds": {"all": 2}}, "step 1 done in 12 s\n"),
        )
    )
    assert canonical("1.txt", first) == canonical("1.txt", second)
    assert canonical("1.txt", first) != canonical("1.txt", second.replace("[2]", "[3]"))
    assert canonical("1.txt", first) != canonical("1.txt", second.replace("step 1", "step 2"))
