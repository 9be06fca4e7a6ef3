"""Why something failed, in one line: for reports, logs and the text of other errors."""

from __future__ import annotations

import json
import textwrap
import traceback
from typing import Any

_READERS = ("torch.serialization", "torch._weights_only_unpickler")
_MOST = 300  # characters


def reason(error: BaseException, most: int = _MOST) -> str:
    """Return an error's kind and its text, in one line.

    Args:
        error: The error.
        most: Characters; a longer text ends at a word, with "...".
    """
    text = one_line(str(error), most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(text: str, most: int = _MOST) -> str:
    """Return a text in one line of at most so many characters, cut at a word."""
    return textwrap.shorten(text, most, placeholder=" ...")


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is no JSON, or lists within lists go too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deep") from error


def is_of_weights_file(error: BaseException) -> bool:
    """Return whether an error came up while torch read a .bin file of weights."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") in _READERS for frame, _ in frames)
