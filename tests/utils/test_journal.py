"""A journal file keeps what was appended, whatever a kill or a hand did to its end."""

import json

import pytest

from rope_patch.utils import checksums
from rope_patch.utils import journal as journal_module
from rope_patch.utils.journal import JournalFile, check_lines


def entry(number):
    return checksums.seal({"key": number, "text": "ä\n" * number})


def entries(journal, **identity):
    return [line["key"] for line in check_lines(journal.lines(), **identity).entries]


def test_a_file_begins_with_its_first_entry(tmp_path):
    journal = JournalFile(tmp_path / "new" / "journal.jsonl")
    assert journal.lines() == []
    assert not journal.path.parent.exists()
    journal.append(entry(1), entry(2))
    journal.append(entry(3))
    assert entries(journal) == [1, 2, 3]
    assert [json.loads(line)["key"] for line in journal.path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("tail_bytes", [3, 1 << 16])
def test_an_entry_cut_anywhere_is_not_written_and_its_place_is_taken(
    tmp_path, monkeypatch, tail_bytes
):
    monkeypatch.setattr(journal_module, "_TAIL_BYTES", tail_bytes)
    whole = JournalFile(tmp_path / "whole.jsonl")
    whole.append(entry(1), entry(2))
    raw = whole.path.read_bytes()
    first = len(raw.splitlines(keepends=True)[0])
    for cut in range(len(raw)):
        journal = JournalFile(tmp_path / f"{cut}.jsonl")
        journal.path.write_bytes(raw[:cut])
        # Only the line end may be missing from a whole entry.
        written = [1] * (cut >= first - 1) + [2] * (cut >= len(raw) - 1)
        assert entries(journal) == written, cut
        journal.append(entry(3))
        assert entries(journal) == [*written, 3], cut
        assert not check_lines(journal.lines()).flaws


def test_damaged_and_foreign_lines_are_named_by_number(tmp_path):
    journal = JournalFile(tmp_path / "journal.jsonl")
    journal.append(entry(1), entry(2), entry(3))
    lines = journal.path.read_bytes().replace(b'"key": 2', b'"key": 9')
    journal.path.write_bytes(lines)
    checked = check_lines(journal.lines())
    assert [e["key"] for e in checked.entries] == [1, 3]
    assert checked.flaws == [(2, "it is damaged: its digest differs")]
    assert [number for number, _ in check_lines(journal.lines(), first=5, key=1).flaws] == [6, 7]
    journal.rewrite(checked.valid)
    assert entries(journal) == [1, 3]
    assert not check_lines(journal.lines()).flaws
