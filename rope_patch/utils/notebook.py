"""Text as HTML for notebooks."""

from __future__ import annotations

from html import escape


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
