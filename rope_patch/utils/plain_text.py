"""Plain text for terminals: durations to read, and rows in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def format_duration(seconds: float) -> str:
    """Return a time to read: 2 h 05 min, 3 min 20 s, 12 s."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def align(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line for each row, its cells two spaces apart in columns of one width.

    Args:
        rows: Rows of as many cells each.
        right: Whether all columns but the first stand to the right, as numbers do.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        pad = str.rjust if right else str.ljust
        cells = [first.ljust(widths[0]), *map(pad, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines
