"""Show progress, and format durations, columns, and signed numbers with their intervals."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

logger = logging.getLogger("rope_patch")

_INTERVAL = 15.0  # seconds between two lines of a log
_LOOK = 1.0  # seconds between two looks at whether something was said


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
    """A progress bar for files and pipes: whole lines, one in 15 seconds over all bars."""

    _latest = time.monotonic()  # when a line was written, or this module was imported
    _newest: LogLines | None = None  # the bar that was displayed last, until it is closed

    def __init__(self, *args: Any, **options: Any) -> None:
        if style := options.get("bar_format"):  # in a log the bar only repeats the percentage
            options["bar_format"] = style.replace("|{bar}| ", "")
        # `gui` tells tqdm that this subclass shows the progress by itself.
        super().__init__(*args, **{**options, "gui": True})

    def display(self, *_: Any, **__: Any) -> None:
        """Write a line, unless another one was written less than 15 seconds ago."""
        now = time.monotonic()
        LogLines._newest = self
        if now - LogLines._latest >= _INTERVAL:
            LogLines._latest = now
            print(self, file=sys.stderr, flush=True)

    def clear(self, *_: Any, **__: Any) -> None:
        """Leave lines of a log as they are."""

    def close(self) -> None:
        """End the bar."""
        super().close()
        if LogLines._newest is self:
            LogLines._newest = None


@contextlib.contextmanager
def never_silent() -> Iterator[None]:
    """Write a line on stderr whenever nothing was said for 15 seconds, while the block runs.

    It is the state of the bar that was shown last; without one, as while weights are read, the time
    that has passed. On a terminal bars show by themselves.
    """
    ended, started = threading.Event(), time.monotonic()
    LogLines._latest = started

    def watch() -> None:
        while not ended.wait(_LOOK):
            now = time.monotonic()
            if now - LogLines._latest < _INTERVAL or not logger.isEnabledFor(logging.WARNING):
                continue
            LogLines._latest = now
            if LogLines._newest is not None:
                print(LogLines._newest, file=sys.stderr, flush=True)
            elif not getattr(tqdm, "_instances", None):  # no bar on a terminal either
                text = f"working, {format_duration(now - started)} so far"
                print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def format_duration(seconds: float) -> str:
    """Return a time to read: 2 h 05 min, 3 min 20 s, 12 s."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@dataclass(frozen=True)
class SignedFormat:
    """The form of differences: each number has its sign, +0.12 or −3.0.

    Attributes:
        digits: Digits behind the point.
        minus: The sign of negative numbers: a hyphen for terminals, "−" for pages.
        zero: The sign of a number that rounds to zero; its own sign if None.
        unit: Follows every number.
    """

    digits: int
    minus: str = "-"
    zero: str | None = None
    unit: str = ""

    def number(self, value: float) -> str:
        """Return a number with its sign."""
        text = f"{value:+.{self.digits}f}"
        sign, magnitude = text[0], text[1:]
        if self.zero is not None and float(magnitude) == 0:
            sign = self.zero
        elif sign == "-":
            sign = self.minus
        return f"{sign}{magnitude}{self.unit}"

    def range(self, low: float, high: float) -> str:
        """Return an interval: +0.05 to +0.19."""
        return f"{self.number(low)} to {self.number(high)}"

    def with_interval(
        self, value: float, bounds: Sequence[float], *, unit: str = "", range_unit: str = ""
    ) -> str:
        """Return a number with its interval in brackets: +0.12 nats (+0.05 to +0.19).

        Args:
            value: The number.
            bounds: The low and the high end; infinite if the interval is unknown.
            unit: Follows the number, and not the ends.
            range_unit: Follows the interval.
        """
        low, high = bounds
        known = not math.isinf(high - low)  # infinite where there are too few texts
        span = f"{self.range(low, high)}{range_unit}" if known else "no interval"
        return f"{self.number(value)}{unit} ({span})"


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
