"""Test data that is no document: devices, half characters, lines larger than memory."""

import gzip
import json
from pathlib import Path

import pytest
from packed_rows import TINY
from transformers import AutoTokenizer

from rope_patch.training.data import readers
from rope_patch.training.data.documents import tokenize
from rope_patch.training.data.sources import find_source, fingerprint


@pytest.mark.parametrize("read", [lambda source: find_source(source, "text"), fingerprint])
def test_a_device_is_no_data(read):
    with pytest.raises(ValueError, match=r"/dev/zero: expected a file or a folder, got a device"):
        read("/dev/zero")


def test_half_a_character_names_file_and_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "whole"}) + "\n" + json.dumps({"text": "ab\ud800c"}) + "\n")
    first, second = find_source(str(path), "text")[0].read()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(tokenize(first, tokenizer, "text").ids)
    with pytest.raises(ValueError, match=r"jsonl:2: expected text, .*\\ud800\) at character 3"):
        tokenize(second, tokenizer, "text")


@pytest.mark.parametrize(("name", "place"), [("big.jsonl.gz", "gz:2"), ("big.txt.gz", "gz")])
def test_a_small_file_that_holds_much_is_refused_before_memory_is_full(
    name, place, tmp_path, monkeypatch
):
    monkeypatch.setattr(readers, "_MOST", 2**20)
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' + b"a" * 2**22))
    assert path.stat().st_size < 2**14
    (reader,) = find_source(str(path), "text")
    with pytest.raises(ValueError, match=rf"{place}: expected a .* of at most 1 MiB"):
        [document.load() for document in reader.read()]


def test_a_line_of_the_largest_size_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MOST", 14)
    path = Path(tmp_path / "data.jsonl")
    path.write_text('{"text": "a"}\n' * 3)
    assert len([d.load() for d in find_source(str(path), "text")[0].read()]) == 3
