"""Test the journal of a search: stored measurements, damage, and journals of other searches."""

import json

import pytest

from rope_patch.searching import SearchJournal

IDENTITY = {"weights": "abc", "factor": 4.0, "options": {}, "versions": {"torch": "2"}}


def write_journal(folder, count=3):
    journal = SearchJournal(folder, IDENTITY)
    for number in range(count):
        journal.put(f"search/{number}", {"fitness": 1 / (1 + number)})
    journal.close()
    return folder / "state.jsonl"


def test_measurements_are_written_immediately_and_read_back_exactly(tmp_path):
    folder = tmp_path / "new" / "folder"
    journal = SearchJournal(folder, IDENTITY)
    assert not folder.exists()  # before the first measurement
    values = [{"a": 0.1 + 0.2}, {"b": float("inf")}, {"c": [1e-300, 2 / 3]}]
    for number, value in enumerate(values):
        journal.put(str(number), value)
        assert len((folder / "state.jsonl").read_bytes().splitlines()) == 2 + number
    journal.close()
    again = SearchJournal(folder, json.loads(json.dumps(IDENTITY)))
    assert len(again) == 3
    assert [again.get(key) for key in "0123"] == [*values, None]


@pytest.mark.parametrize(
    ("cut", "left"),
    [(1, 3), (2, 2), (20, 2), (None, 0)],
    ids=["newline", "brace", "half a line", "all but the start of the first line"],
)
def test_a_file_that_a_kill_cut_short_is_continued(tmp_path, cut, left):
    path = write_journal(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: 30 if cut is None else -cut])
    journal = SearchJournal(tmp_path, IDENTITY)
    assert len(journal) == left
    for number in range(left, 4):
        journal.put(f"search/{number}", {"fitness": 1 / (1 + number)})
    journal.close()
    assert path.read_bytes().startswith(content)
    assert len(SearchJournal(tmp_path, IDENTITY)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "xyz"}, 'weights.* "abc".* "xyz"'),
        ({"factor": 8.0, "options": {"a": 1}}, r"factor.* 4\.0 .* 8\.0 .*; options"),
        ({"more": 1}, "more.* null .* 1 "),
    ],
)
def test_the_journal_of_another_search_is_refused_and_left_unchanged(tmp_path, changes, message):
    path = write_journal(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        SearchJournal(tmp_path, IDENTITY | changes)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [b"{}", b'{"format": "rope_patch.searching/1", "identity": {}}', b"[]", b"\0\0\0", None],
)
def test_a_damaged_first_line_is_refused_and_left_unchanged(tmp_path, line):
    path = write_journal(tmp_path)
    lines = path.read_bytes().splitlines()
    lines[0] = line or lines[0].replace(b'"abc"', b'"abd"')
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="left as it is"):
        SearchJournal(tmp_path, IDENTITY)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["number", "junk", "another search", "unsealed"])
def test_a_damaged_measurement_is_reported_and_dropped(tmp_path, damage, caplog):
    path, other = write_journal(tmp_path), tmp_path / "other"
    content = path.read_bytes()
    lines = content.splitlines()
    journal = SearchJournal(other, IDENTITY | {"weights": "xyz"})
    journal.put("search/1", {"fitness": 0.5})
    journal.close()
    lines[2] = {
        "number": lines[2].replace(b"0.5", b"0.6"),
        "junk": b"\0\0\0",
        "another search": (other / "state.jsonl").read_bytes().splitlines()[1],
        "unsealed": b'{"key": "search/1", "value": {"fitness": 0.5}}',
    }[damage]
    path.write_bytes(b"\n".join(lines) + b"\n")
    journal = SearchJournal(tmp_path, IDENTITY)
    assert (len(journal), journal.get("search/1")) == (2, None)
    journal.lock()
    (line,) = caplog.messages
    assert line.startswith(f"{path}: what was there is measured again: line 3: it ")
    assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[i] for i in (0, 1, 3))
    journal.put("search/1", {"fitness": 0.5})
    journal.close()
    assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())


def test_a_journal_without_a_config_goes_on_with_a_warning(tmp_path, caplog):
    content = write_journal(tmp_path).read_bytes()  # as 0.1 wrote it
    journal = SearchJournal(tmp_path, IDENTITY | {"config": "sha256:1"})
    assert len(journal) == len(SearchJournal(tmp_path, IDENTITY))
    assert "did not note the model's config" in caplog.messages[0]
    assert len(caplog.messages) == 1
    journal.put("search/9", {"fitness": 1.0})
    journal.close()
    assert (tmp_path / "state.jsonl").read_bytes().startswith(content)
    assert len(SearchJournal(tmp_path, IDENTITY)) == len(journal)


def test_a_journal_is_locked_by_one_search_at_a_time(tmp_path):
    first = SearchJournal(tmp_path, IDENTITY)
    first.put("a", {})
    second = SearchJournal(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match="another process works in"):
        second.lock()
    first.put("b", {})
    first.close()
    second.lock()
    assert len(second) == 2  # the measurements of the first one
    second.put("c", {})
    assert len(SearchJournal(tmp_path, IDENTITY)) == 3


@pytest.mark.parametrize("other_change", ["mended", "removed"])
def test_changes_by_another_search_since_reading_are_respected(tmp_path, other_change):
    path = write_journal(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6"))
    journal = SearchJournal(tmp_path, IDENTITY)
    if other_change == "removed":
        path.unlink()
    else:
        other = SearchJournal(tmp_path, IDENTITY)
        for number in (1, 3, 4):
            other.put(f"search/{number}", {"fitness": 1 / (1 + number)})
        other.close()
    before = path.read_bytes() if path.exists() else None
    journal.put("search/5", {"fitness": 1 / 6})
    journal.close()
    numbers = [5] if before is None else range(6)
    reopened = SearchJournal(tmp_path, IDENTITY)
    assert len(reopened) == len(journal) == len(numbers)
    for number in numbers:
        assert reopened.get(f"search/{number}") == {"fitness": 1 / (1 + number)}
    assert path.read_bytes().startswith(before or b"{")
    assert b"\0" not in path.read_bytes()


def test_a_later_file_of_another_search_is_left_unchanged(tmp_path):
    journal = SearchJournal(tmp_path, IDENTITY | {"weights": "xyz"})
    before = write_journal(tmp_path).read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match="weights"):
            journal.put("search/0", {"fitness": 0.1})
    assert (tmp_path / "state.jsonl").read_bytes() == before


def test_a_journal_without_a_folder_stays_in_memory():
    journal = SearchJournal(None, IDENTITY)
    assert journal.put("a", {"b": (1, 2)}) == {"b": [1, 2]} == journal.get("a")
    journal.lock()
    journal.close()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder"):
        SearchJournal(tmp_path / "file", IDENTITY)
