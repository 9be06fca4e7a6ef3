"""Write errors in one line, and words of others in Markdown, on terminals and in notebooks."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from html import escape
from typing import Any

_READERS = ("torch.serialization", "torch._weights_only_unpickler")
_MAX_LENGTH = 300  # characters


class Refused(ValueError):
    """A request cannot be met, for the reason in the message.

    Code that tries a request and handles its refusal catches this class, so that a ValueError that
    a bug raises passes through.
    """


def describe_error(error: BaseException, max_length: int = _MAX_LENGTH) -> str:
    """Return an error's kind and its text, in one line.

    Args:
        error: The error.
        max_length: Characters; a longer text ends at a word, with "...".
    """
    text = one_line(str(error), max_length)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(text: object, max_length: int | None = _MAX_LENGTH) -> str:
    """Return a text as one printable line.

    Args:
        text: The text, or what has one.
        max_length: Characters; a longer text ends in "...", at a word if there is one. None cuts
            nothing.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    if max_length is None or len(line) <= max_length:
        return line
    head = line[: max_length - 4]
    words = head.rpartition(" ")[0]
    return (words if len(words) >= max_length // 2 else head) + " ..."


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean 'name'?)" for the name that is closest to a wrong one, or "".

    Args:
        word: The wrong name.
        known: The right names.
        cutoff: How similar a name must be, from 0 to 1.
    """
    close = get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is no JSON, or lists within lists go too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deep") from error


def is_weights_file_error(error: BaseException) -> bool:
    """Return whether torch raised an error while it read a .bin file of weights."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") in _READERS for frame, _ in frames)


def escape_markdown(text: object) -> str:
    """Return a text as one line of Markdown that shows it, also within a table."""
    return _escape(one_line(text, max_length=None))


def markdown_prose(text: object) -> str:
    """Return a sentence as one line of Markdown; what stands between backticks is code."""
    words, *rest = re.split(r"`([^`]+)`", one_line(text, max_length=None))
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return _escape(words) + "".join(markdown_code(code) + _escape(after) for code, after in pairs)


def markdown_code(text: object) -> str:
    """Return a text as code within a line of Markdown, whatever backticks it has."""
    line = one_line(text, max_length=None)
    fence = "`" * (1 + _longest_run(line))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def markdown_block(text: object, language: str = "") -> str:
    """Return lines as a block of code in Markdown, whatever backticks they have."""
    lines = printable(text)
    fence = "`" * max(3, 1 + _longest_run(lines))
    return f"{fence}{language}\n{lines}\n{fence}"


def markdown_table(rows: Iterable[Sequence[object]], columns: str) -> list[str]:
    """Return a table's lines in Markdown, its texts escaped.

    Args:
        rows: The cells of each row; the first one is the head.
        columns: A letter for each column: l if its text stands to the left, r if to the right.
    """
    head, *others = ("| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows)
    rule = "".join({"l": "|:--", "r": "|--:"}[column] for column in columns) + "|"
    return [head, rule, *others]


def printable(text: object) -> str:
    """Return a text whose characters cannot control a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in str(text))


def _escape(line: str) -> str:
    # Entities, because not every reader of Markdown takes a backslash before a bracket of HTML.
    return re.sub(r"([\\`*_{}\[\]|~$]|(?<!&)#)", r"\\\1", escape(line, quote=False))


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)


def text_html(text: str) -> str:
    """Return a text as a fragment of HTML, its first line as the title.

    Colours and sizes are the notebook's own, light or dark; long lines scroll.

    Args:
        text: Lines whose columns are aligned.
    """
    title, _, rest = text.partition("\n")
    body = (
        '<pre style="margin: 0.4em 0 0; padding: 0; background: none; border: 0; color: inherit; '
        f'white-space: pre; overflow-x: auto">{escape(rest)}</pre>'
        if rest
        else ""
    )
    return f"<div><strong>{escape(title)}</strong>{body}</div>"
