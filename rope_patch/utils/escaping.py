"""Words of others (names, folders, errors, commands) in Markdown and on terminals."""

from __future__ import annotations

import re
from html import escape

from rope_patch.utils.errors import one_line


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


def printable(text: object) -> str:
    """Return a text whose characters cannot control a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in str(text))


def _escape(line: str) -> str:
    # Entities, because not every reader of Markdown takes a backslash before a bracket of HTML.
    return re.sub(r"([\\`*_{}\[\]|~$]|(?<!&)#)", r"\\\1", escape(line, quote=False))


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
