"""Show progress bars on a terminal, in a log or a notebook, and format durations and columns."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm.auto import tqdm

logger = logging.getLogger("rope_patch")

_INTERVAL = 60.0  # seconds between two lines of a log


def progress_bar(
    iterable: Iterable[Any] | None = None, *, disable: bool = False, **options: Any
) -> tqdm[Any]:
    """Return a progress bar on stderr.

    The bar is hidden where the logger `rope_patch` lets no warnings through (`rope-patch -q`).

    Args:
        iterable: What to iterate over, if anything.
        disable: Hide the bar.
        **options: As for `tqdm.tqdm`.
    """
    in_notebook = "ipykernel" in sys.modules
    bar = tqdm if sys.stderr.isatty() or in_notebook else LogLines
    disable = disable or not logger.isEnabledFor(logging.WARNING)
    return bar(iterable, disable=disable, **options)


class LogLines(tqdm):
    """A progress bar for files and pipes: whole lines, at most one a minute over all bars."""

    _latest = time.monotonic()  # when a line was written, or this module was imported

    def __init__(self, *args: Any, **options: Any) -> None:
        if style := options.get("bar_format"):  # in a log the bar only repeats the percentage
            options["bar_format"] = style.replace("|{bar}| ", "")
        # `gui` tells tqdm that this subclass shows the progress by itself.
        super().__init__(*args, **{**options, "gui": True})

    def display(self, *_: Any, **__: Any) -> None:
        """Write a line, unless another one was written less than a minute ago."""
        now = time.monotonic()
        if now - LogLines._latest >= _INTERVAL:
            LogLines._latest = now
            print(self, file=sys.stderr, flush=True)

    def clear(self, *_: Any, **__: Any) -> None:
        """Leave lines of a log as they are."""


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
