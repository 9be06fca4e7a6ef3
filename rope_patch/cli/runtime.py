"""Runtime helpers of commands: missing packages, Ctrl-C, the command line as typed."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator

import typer

from rope_patch.cli.interrupt import EXIT_CODE
from rope_patch.utils.escaping import printable


@contextlib.contextmanager
def requires_extra(subject: str, extra: str) -> Iterator[None]:
    """Turn an ImportError into a hint at what to install.

    Args:
        subject: Subject and verb of the message, such as "searching needs".
        extra: The extra of rope-patch to install.

    Raises:
        ValueError: A package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which {subject}: pip install 'rope-patch[{extra}]'"
        ) from error


@contextlib.contextmanager
def handle_interrupt(hint: str = "the same command continues from here") -> Iterator[None]:
    """Exit on Ctrl-C with a hint how to continue and the exit code that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; {hint}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None


def show(text: object) -> None:
    """Print a result, whose words may be those of others, without what controls a terminal."""
    print(printable(text))


def command_line() -> str:
    """Return the command as typed, to record in results."""
    return shlex.join(["rope-patch", *sys.argv[1:]])
