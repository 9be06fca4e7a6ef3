"""Test the checksum of a report's JSON: edits, other formats and damaged text are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rope_patch.utils.checksums import FORMAT, add_checksum, digest, file_sha256, verify_checksum

RESULTS: dict[str, Any] = {
    "run": {"model": "tiny", "trained_length": 4096},
    "methods": [{"label": "yarn ×2", "method": "yarn"}],
    "perplexity": {"losses": {"none": [[2.5, 1e-300, 0.1 + 0.2]]}},
}


def test_verified_results_are_the_signed_ones() -> None:
    signed = add_checksum(RESULTS)
    assert signed["format"] == FORMAT
    for loaded in (signed, json.dumps(signed), json.dumps(signed, indent=3).encode()):
        assert verify_checksum(loaded, "report.json") == RESULTS


def test_signing_twice_changes_nothing() -> None:
    assert add_checksum(add_checksum(RESULTS)) == add_checksum(RESULTS)


def test_order_of_keys_does_not_matter() -> None:
    signed = add_checksum(RESULTS)
    assert verify_checksum(dict(reversed(signed.items())), "report.json") == RESULTS


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


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "<html>"])
def test_text_that_is_no_json_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"here\.json is not JSON"):
        verify_checksum(text, "here.json")


@pytest.mark.parametrize("loaded", [[], 3, None, {}, {"format": "other/1"}, {"results": {}}])
def test_json_of_another_program_is_refused(loaded: Any) -> None:
    with pytest.raises(ValueError, match=r"here\.json is not a report of rope-patch eval"):
        verify_checksum(loaded, "here.json")


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
