"""The state of a search: what is kept, what is refused, and that nothing is lost."""

import json

import pytest

from rope_patch.searching.journal import JOURNAL_FILE, SearchJournal

IDENTITY = {"weights": "abc", "factor": 4.0, "options": {}, "versions": {"torch": "2"}}


def filled(folder, count=3):
    state = SearchJournal(folder, IDENTITY)
    for number in range(count):
        state.put(f"search/{number}", {"fitness": 1 / (1 + number)})
    state.close()
    return folder / JOURNAL_FILE


def test_everything_is_there_again(tmp_path):
    filled(tmp_path / "new" / "folder")
    state = SearchJournal(tmp_path / "new" / "folder", IDENTITY)
    assert len(state) == 3
    assert state.get("search/2") == {"fitness": 1 / 3}
    assert state.get("search/3") is None


def test_nothing_is_written_before_the_first_measurement(tmp_path):
    SearchJournal(tmp_path / "none", IDENTITY)
    assert not (tmp_path / "none").exists()


def test_every_line_is_on_the_disk_at_once(tmp_path):
    state = SearchJournal(tmp_path, IDENTITY)
    for number in range(3):
        state.put(str(number), {})
        assert len((tmp_path / JOURNAL_FILE).read_bytes().splitlines()) == 2 + number


@pytest.mark.parametrize("cut", [2, 5, 20])
def test_half_a_last_line_is_dropped_and_overwritten(tmp_path, cut):
    path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    state = SearchJournal(tmp_path, IDENTITY)
    assert len(state) == 2
    state.put("search/2", {"fitness": 1 / 3})
    state.close()
    assert path.read_bytes() == whole


def test_a_last_line_without_its_end_is_a_measurement(tmp_path):
    path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    state = SearchJournal(tmp_path, IDENTITY)
    assert len(state) == 3
    state.put("search/3", {})
    state.close()
    assert path.read_bytes().startswith(whole)
    assert len(SearchJournal(tmp_path, IDENTITY)) == 4


def test_half_a_first_line_is_a_search_that_did_not_begin(tmp_path):
    path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:30])
    assert len(SearchJournal(tmp_path, IDENTITY)) == 0
    assert filled(tmp_path).read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": "xyz"}, 'weights is "abc" there and "xyz" here'),
        ({"factor": 8.0, "options": {"a": 1}}, r"factor is 4.0 there and 8.0 here; options is \{"),
        ({"more": 1}, "more is null there and 1 here"),
    ],
)
def test_another_search_is_refused_and_left_as_it_is(tmp_path, changes, said):
    path = filled(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"the state of another search: {said}"):
        SearchJournal(tmp_path, IDENTITY | changes)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [b"{}", b'{"format": "other/3"}', b"[]", b"\0\0\0", None],
)
def test_a_damaged_first_line_is_refused_and_left_as_it_is(tmp_path, line):
    path = filled(tmp_path)
    lines = path.read_bytes().splitlines()
    lines[0] = line or lines[0].replace(b'"abc"', b'"abd"')
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="left as it is"):
        SearchJournal(tmp_path, IDENTITY)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["number", "junk", "another search", "unsealed"])
def test_a_damaged_measurement_is_dropped_with_a_line_and_measured_again(tmp_path, damage, caplog):
    path, other = filled(tmp_path), tmp_path / "other"
    whole = path.read_bytes()
    lines = whole.splitlines()
    state = SearchJournal(other, IDENTITY | {"weights": "xyz"})
    state.put("search/1", {"fitness": 0.5})
    state.close()
    lines[2] = {
        "number": lines[2].replace(b"0.5", b"0.6"),
        "junk": b"\0\0\0",
        "another search": (other / JOURNAL_FILE).read_bytes().splitlines()[1],
        "unsealed": b'{"key": "search/1", "value": {"fitness": 0.5}}',
    }[damage]
    path.write_bytes(b"\n".join(lines) + b"\n")
    state = SearchJournal(tmp_path, IDENTITY)
    assert (len(state), state.get("search/1")) == (2, None)
    state.lock()
    (line,) = caplog.messages
    assert line.startswith(f"{path}: what was there is measured again: line 3: it ")
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[i] for i in (0, 1, 3))
    state.put("search/1", {"fitness": 0.5})
    state.close()
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_state_without_digests_is_measured_again(tmp_path, caplog):
    path = tmp_path / JOURNAL_FILE
    header = {"format": "rope_patch.searching/1", "identity": IDENTITY}
    entry = {"key": "search/0", "value": {"fitness": 1.0}}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(entry)}\n")
    state = SearchJournal(tmp_path, IDENTITY)
    assert len(state) == 0
    state.close()
    assert "measured again: line 1: it has no digests" in caplog.messages[0]
    assert filled(tmp_path).read_bytes() == filled(tmp_path / "new").read_bytes()


def test_one_search_at_a_time(tmp_path):
    first = SearchJournal(tmp_path, IDENTITY)
    first.put("a", {})
    second = SearchJournal(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match="another process works in"):
        second.lock()
    first.put("b", {})
    first.close()
    second.lock()
    assert len(second) == 2  # what came meanwhile
    second.put("c", {})
    assert len(SearchJournal(tmp_path, IDENTITY)) == 3


@pytest.mark.parametrize("after", ["mended", "removed"])
def test_what_another_search_did_to_the_file_since_it_was_read_counts(tmp_path, after):
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6"))
    waiting = SearchJournal(tmp_path, IDENTITY)
    if after == "removed":
        path.unlink()
    else:
        other = SearchJournal(tmp_path, IDENTITY)
        for number in (1, 3, 4):
            other.put(f"search/{number}", {"fitness": 1 / (1 + number)})
        other.close()
    before = path.read_bytes() if path.exists() else None
    waiting.put("search/5", {"fitness": 1 / 6})
    waiting.close()
    numbers = [5] if before is None else range(6)
    again = SearchJournal(tmp_path, IDENTITY)
    assert len(again) == len(waiting) == len(numbers)
    for number in numbers:
        assert again.get(f"search/{number}") == {"fitness": 1 / (1 + number)}
    assert path.read_bytes().startswith(before or b"{")
    assert b"\0" not in path.read_bytes()


def test_a_file_of_another_search_that_came_since_is_never_written_to(tmp_path):
    waiting = SearchJournal(tmp_path, IDENTITY | {"weights": "xyz"})
    before = filled(tmp_path).read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match="the state of another search"):
            waiting.put("search/0", {"fitness": 0.1})
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before


def test_without_a_folder_it_is_in_memory():
    state = SearchJournal(None, IDENTITY)
    assert state.put("a", {"b": (1, 2)}) == {"b": [1, 2]} == state.get("a")
    state.lock()
    state.close()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        SearchJournal(tmp_path / "file", IDENTITY)


def test_numbers_come_back_as_they_were(tmp_path):
    state = SearchJournal(tmp_path, IDENTITY)
    values = {"a": 0.1 + 0.2, "b": float("inf"), "c": [1e-300, 2 / 3]}
    state.put("x", values)
    state.close()
    assert SearchJournal(tmp_path, json.loads(json.dumps(IDENTITY))).get("x") == values
