"""Long documents: Jane Austen's novels, shipped with the package, or a file of the user's."""

from __future__ import annotations

import lzma
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

_NOVELS = files("rope_patch.eval") / "data"


def names() -> list[str]:
    """Names of the texts that come with the package."""
    found = (entry.name for entry in _NOVELS.iterdir())
    return sorted(name.removesuffix(".txt.xz") for name in found if name.endswith(".txt.xz"))


def read(text: str) -> str:
    """Reads a text.

    Args:
        text: One of `names()`, or the path of a UTF-8 file, plain or compressed with xz.

    Raises:
        ValueError: Neither, or not text.
    """
    path = Path(text)
    if text in names():
        raw = (_NOVELS / f"{text}.txt.xz").read_bytes()
    elif path.is_file():
        raw = path.read_bytes()
    else:
        close = get_close_matches(text, names(), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"no text {text!r}{hint}: expected a file, or one of {', '.join(names())}")
    try:
        raw = lzma.decompress(raw) if text in names() or path.suffix == ".xz" else raw
        return raw.decode("utf-8")
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{text} is not UTF-8 text, plain or compressed with xz: {error}"
        ) from None


def tokens(text: str, tokenizer: Any, length: int) -> list[int]:
    """The first `length` tokens of a text.

    Raises:
        ValueError: The text is shorter.
    """
    ids = tokenizer(read(text), verbose=False).input_ids
    if len(ids) < length:
        raise ValueError(
            f"the text {text!r} has {len(ids):,} tokens, {length:,} are needed: give a longer one "
            "or a shorter length"
        )
    return ids[:length]
