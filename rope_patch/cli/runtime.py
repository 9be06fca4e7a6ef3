"""Runtime of commands: missing packages, Ctrl-C and exit codes, messages on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO

from rope_patch.utils.errors import printable
from rope_patch.utils.installation import install_hint

logger = logging.getLogger("rope_patch")

EXIT_CODE = 130  # what shells expect of a command that SIGINT ended
# docs/exit-codes.md has all of them. A command that has a verdict refuses with 2.
VERDICT, REFUSED, CRASHED = 1, 1, 2
# Variables that the libraries read when they are imported.
_HIDE_BARS = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_ERRORS_ONLY = {"TRANSFORMERS_VERBOSITY": "error"}


@contextlib.contextmanager
def requires_extra(subject: str, extra: str, *packages: str) -> Iterator[None]:
    """Turn an ImportError into a hint at what to install.

    Args:
        subject: Subject and verb of the message, such as "searching needs".
        extra: The extra of rope-patch to install.
        *packages: Modules that are looked for first, as they are imported after long work.

    Raises:
        ValueError: A package is missing.
    """
    advice = f"is not installed, which {subject}: {install_hint(extra)}"
    for package in packages:
        if find_spec(package) is None:
            raise ValueError(f"{package} {advice}")
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{error.name} {advice}") from error


@contextlib.contextmanager
def handle_interrupt(hint: str = "the same command continues from here") -> Iterator[None]:
    """Run long work: exit on Ctrl-C with a hint how to continue, and never be silent for long."""
    import typer  # not with this module, which `main` imports before it handles Ctrl-C

    from rope_patch.utils.terminal import never_silent

    try:
        with never_silent():
            yield
    except KeyboardInterrupt:
        import typer  # below `interruptible`, which handles a SIGINT during imports

        print(f"stopped; {hint}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None


@contextlib.contextmanager
def study(subject: str, extra: str) -> Iterator[None]:
    """Run a study, which patches hundreds of candidates and continues where it was stopped.

    Args:
        subject: See `requires_extra`.
        extra: See `requires_extra`.
    """
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)  # hides the log of each patch
    with requires_extra(subject, extra, "scipy", "matplotlib"), handle_interrupt():
        yield


def show(text: object) -> None:
    """Print a result, whose words may be those of others, without what controls a terminal."""
    print(printable(text))


class Result(Protocol):
    """A result with data for JSON; its text is for people."""

    def to_dict(self) -> dict[str, Any]: ...


def show_result(result: Result, as_json: bool, file: Path | None = None) -> None:
    """Print a result: its text, with the file that holds it, or its data as strict JSON."""
    if as_json:
        show(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        show(result if file is None else f"{result}\n\n{file}")


def show_report(folder: Path, as_json: bool) -> None:
    """Print where the page of a written report is, or the report as JSON."""
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"\n{folder / 'report.html'}")


def command_line() -> str:
    """Return the command as typed, to record in results."""
    return shlex.join(["rope-patch", *sys.argv[1:]])


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


class _Output:
    """Text to a stream whose reader may leave: what comes then is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        # Also for what is buffered, which Python writes when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """Go on in silence if nobody reads the output any more, as behind `| head`.

    The exit code stays the command's own: a verdict is the same, whoever reads it.
    """
    streams = sys.stdout, sys.stderr
    outputs = [_Output(stream) for stream in streams]
    sys.stdout, sys.stderr = outputs
    try:
        yield
    finally:
        for output in outputs:
            output.flush()
        sys.stdout, sys.stderr = streams


class _PrintableFormatter(logging.Formatter):
    """Messages without characters that control a terminal: names in them are of others."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message of a record."""
        return printable(super().format(record))


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """Send messages to stderr; hide the libraries' own progress bars where it is no terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    root = logging.getLogger()
    levels = root.level, logger.level
    variables = {name: os.environ.get(name) for name in _HIDE_BARS | _ERRORS_ONLY}
    logger.setLevel(logging.INFO)
    if not sys.stderr.isatty():
        _set(_HIDE_BARS)
    try:
        with warnings.catch_warnings():
            yield
    finally:  # for callers of `main` within their own process
        root.setLevel(levels[0])
        logger.setLevel(levels[1])
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)


def be_verbose(on: bool = True) -> None:
    """Show messages for debugging as well."""
    if on:
        logger.setLevel(logging.DEBUG)


def be_quiet(on: bool = True) -> None:
    """Show neither messages nor progress; errors still end a command with one line."""
    if on:
        logging.getLogger().setLevel(logging.ERROR)
        logger.setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        _set(_HIDE_BARS | _ERRORS_ONLY)


def _set(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
