"""Verbosity of commands on stderr: messages of the logger `rope_patch`, progress bars."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from rope_patch.utils.escaping import printable

logger = logging.getLogger("rope_patch")

# Variables that the libraries read when they are imported.
_HIDE_BARS = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_ERRORS_ONLY = {"TRANSFORMERS_VERBOSITY": "error"}


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


def silence_patch_log() -> None:
    """Hide the log of each patch, for commands that patch hundreds of candidates."""
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)


def _set(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
