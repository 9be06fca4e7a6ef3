"""Names of others (models, served models, folders, commands) in Markdown and on terminals."""

from __future__ import annotations

import re
from html import escape

from rope_patch.utils.errors import one_line


def escape_markdown(text: object) -> str:
    """Return a text as one line of Markdown that shows it, also within a table."""
    # Entities, because not every reader of Markdown takes a backslash before a bracket of HTML.
    text = escape(one_line(text, max_length=None), quote=False)
    return re.sub(r"([\\`*_{}\[\]|~$]|(?<!&)#)", r"\\\1", text)


def markdown_code(text: object) -> str:
    """Return a text as code within a line of Markdown, whatever backticks it has."""
    line = one_line(text, max_length=None)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def printable(text: object) -> str:
    """Return a text whose characters cannot control a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in str(text))
