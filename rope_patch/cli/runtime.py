"""How long commands run: what they need installed, what they say, how they are stopped."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator

import typer

from rope_patch.cli.interrupt import EXIT_CODE


@contextlib.contextmanager
def requires_extra(what: str, extra: str) -> Iterator[None]:
    """Turns a missing package into what to install.

    Args:
        what: Which needs it, with its verb: "searching needs".
        extra: Of this package.

    Raises:
        ValueError: A package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which {what}: pip install 'rope-patch[{extra}]'"
        ) from error


@contextlib.contextmanager
def handle_interrupt(how: str = "the same command continues from here") -> Iterator[None]:
    """Ends at Ctrl-C with how to go on, and the exit code that shells expect of it."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; {how}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None


def command_line() -> str:
    """The command as it was typed, for results to carry."""
    return shlex.join(["rope-patch", *sys.argv[1:]])
