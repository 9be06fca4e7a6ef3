"""Test the folder of a run: stored results, damage, and identities in one line."""

import json
from pathlib import Path

import pytest

from rope_patch.runs import RunFolder


def test_a_result_is_read_back_and_a_damaged_one_is_reported(tmp_path, caplog):
    folder, name = RunFolder(tmp_path / "new"), "part/a.json"
    assert folder.find(name, "made again") is None
    result = {"format": "f/1", "value": [0.1 + 0.2, None]}
    folder.write(name, result)
    assert folder.find(name, "made again", format="f/1") == result
    assert not caplog.messages
    path = folder.path / name
    assert list(path.parent.iterdir()) == [path]  # no temporary file
    for content, message in (
        (path.read_text(), "its format is 'f/1'"),
        (path.read_text().replace("null", "1"), "its digest differs"),
    ):
        path.write_text(content)
        assert folder.find(name, "made again", format="f/2") is None
        assert caplog.messages[-1].startswith(f"{path} is made again: ")
        with pytest.raises(ValueError, match=message):
            folder.read(name, format="f/2")


def test_differences_are_named_in_one_line_each():
    folder = RunFolder(
        Path("unused"), {"seed": 1, "lengths": (1, 2), "data": ["b"] * 99, "new": "x"}
    )
    stored = {"seed": 2, "lengths": [1, 2], "data": ["a"], "old": True}
    lines = folder.differences(stored)
    assert list(lines) == ["seed", "data", "old", "new"]
    assert lines["seed"] == "seed was 2, got 1"
    assert lines["data"].startswith("data was ['a'], got ['b', 'b'")
    assert lines["data"].endswith("... (495 characters)")
    assert lines["old"] == "old was True, got None"
    sizes = folder.differences(stored, "{name}: {old} {new}", show=json.dumps, compared=type)
    assert sizes == {"old": "old: true null", "new": 'new: null "x"'}
