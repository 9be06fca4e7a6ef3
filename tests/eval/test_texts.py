"""The novels that come with the package, and texts of the user's."""

import lzma

import pytest
from transformers import AutoTokenizer

from rope_patch.eval import texts


def test_the_novels_are_whole():
    assert len(texts.names()) == 6
    assert texts.read("emma").count("Mr. Knightley") > 200
    assert all(300_000 < len(texts.read(name)) < 1_000_000 for name in texts.names())


@pytest.mark.parametrize("suffix", [".txt", ".txt.xz"])
def test_a_file_of_the_users_is_read_plain_or_compressed(tmp_path, suffix):
    path = tmp_path / f"book{suffix}"
    raw = "Straße".encode()
    path.write_bytes(lzma.compress(raw) if suffix.endswith("xz") else raw)
    assert texts.read(str(path)) == "Straße"


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'emma'"):
        texts.read("ema")
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        texts.read(str(path))


def test_a_text_shorter_than_asked_for_is_refused(tmp_path, request):
    path = tmp_path / "book.txt"
    path.write_text("Only a few words.")
    tiny = request.path.parents[1] / "assets" / "tiny-llama"
    with pytest.raises(ValueError, match=r"has \d+ tokens, 1,000 are needed"):
        texts.tokens(str(path), AutoTokenizer.from_pretrained(tiny), 1000)
