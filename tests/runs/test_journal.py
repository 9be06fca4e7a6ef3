"""Test journal files, checksums and digests of what was written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rope_patch.runs import JournalFile, check_lines
from rope_patch.utils import add_checksum, digest, file_sha256, seal, verify_checksum


def entry(number):
    return seal({"key": number, "text": "ä\n" * number})


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
    monkeypatch.setattr("rope_patch.runs.journal._TAIL_BYTES", tail_bytes)
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


# --- Checksums of a report's JSON, and digests ----------------------------------------------------

RESULTS: dict[str, Any] = {
    "run": {"model": "tiny", "trained_length": 4096},
    "methods": [{"label": "yarn ×2", "method": "yarn"}],
    "perplexity": {"losses": {"none": [[2.5, 1e-300, 0.1 + 0.2]]}},
}


def test_verified_results_are_the_signed_ones_in_any_order_of_keys() -> None:
    signed = add_checksum(RESULTS)
    assert add_checksum(signed) == signed
    assert signed["format"] == "rope_patch.eval/2"
    forms = (signed, dict(reversed(signed.items())), json.dumps(signed))
    for loaded in (*forms, json.dumps(signed, indent=3).encode()):
        assert verify_checksum(loaded, "report.json") == RESULTS


def test_infinities_survive_as_text_that_float_reads() -> None:
    losses = [math.inf, -math.inf, math.nan]
    text = json.dumps(add_checksum({**RESULTS, "losses": losses}), allow_nan=False)
    losses_read = [float(x) for x in verify_checksum(text, "report.json")["losses"]]
    assert losses_read[:2] == losses[:2]
    assert math.isnan(losses_read[2])


@pytest.mark.parametrize(
    "edit",
    [
        lambda r: r["run"].update(model="another"),
        lambda r: r["perplexity"]["losses"]["none"][0].__setitem__(0, 2.4),
        lambda r: r["methods"].append({}),
        lambda r: r.pop("perplexity"),
        lambda r: r.pop("digest"),
        lambda r: r.update(more=1),
        lambda r: r.update(digest="0" * 64),
    ],
)
def test_an_edit_is_refused(edit: Any) -> None:
    loaded = json.loads(json.dumps(add_checksum(RESULTS)))
    edit(loaded)
    with pytest.raises(ValueError, match=r"here\.json was changed after it was written"):
        verify_checksum(loaded, "here.json")


@pytest.mark.parametrize(
    ("problem", "contents"),
    [
        ("is not JSON", ["", "{", b"\xff\xfe", "<html>"]),
        ("is not a report", [[], 3, None, {}, {"format": "other/1"}, {"results": {}}]),
    ],
)
def test_files_of_another_program_are_refused(problem: str, contents: list[Any]) -> None:
    for content in contents:
        with pytest.raises(ValueError, match=rf"here\.json {problem}"):
            verify_checksum(content, "here.json")


@pytest.mark.parametrize("change", [{"format": "rope_patch.eval/1"}, {"format": None}])
def test_another_format_version_is_refused_with_advice(change: dict[str, Any]) -> None:
    loaded = {k: v for k, v in (add_checksum(RESULTS) | change).items() if v is not None}
    with pytest.raises(ValueError, match="run the evaluation again"):
        verify_checksum(loaded, "here.json")


def test_digests_are_sha256_of_text_bytes_and_files(tmp_path: Path) -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest("") == digest(b"") == empty
    assert digest("é", 8) == digest("é".encode())[:8] != empty[:8]
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 2**20)  # of several blocks
    assert file_sha256(path) == digest(b"abc" * 2**20)
