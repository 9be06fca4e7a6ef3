"""Exit codes, and the handling of Ctrl-C: one line on stderr and exit code 130 at any moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 130  # what shells expect of a command that SIGINT ended
# docs/exit-codes.md has all of them. A command that has a verdict refuses with 2.
VERDICT, REFUSED, CRASHED = 1, 1, 2


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGINT while a command runs.

    SIGINT raises KeyboardInterrupt as usual, except during an import. Python swallows exceptions
    that are raised in callbacks of its import locks, and libraries turn them into ImportErrors or
    crash. So during an import the process ends at once, as imports leave nothing half done.

    Does nothing in other threads than the main one, or where SIGINT is ignored or handled already.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Handle SIGTERM, which `timeout` sends, as `interruptible` handles SIGINT.

    Does nothing in other threads than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        os.write(2, b"stopped\n")  # print is not safe here: stderr may be in the midst of a line
        os._exit(EXIT_CODE)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the frame, or one that called it, is Python's import machinery."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
