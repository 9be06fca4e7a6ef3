"""Progress bars on a terminal and in notebooks; in a log, a line a minute."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
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
