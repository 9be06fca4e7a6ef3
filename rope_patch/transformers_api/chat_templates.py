"""Stop the clock of chat templates, which print today's date by `strftime_now`.

`strftime_now` cannot be given as an argument: 5.24 turns arguments into plain data. In all releases
it reads `datetime` of the module that compiles templates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any

from transformers.utils import chat_template_utils

from rope_patch.transformers_api.models import installed_release
from rope_patch.utils.errors import Refused

_one_at_a_time = threading.Lock()  # the clock is a global of transformers' module


@contextmanager
def frozen_clock(now: datetime) -> Iterator[None]:
    """Let `strftime_now` print one moment while templates are rendered.

    Args:
        now: The moment.

    Raises:
        Refused: This release of transformers reads the time elsewhere.
    """

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Frozen:
            return cls.fromtimestamp(now.timestamp(), tz)

    module: Any = chat_template_utils
    with _one_at_a_time:
        before = getattr(module, "datetime", datetime)
        module.datetime = Frozen
        try:
            _require_frozen(now)
            yield
        finally:
            module.datetime = before


def _require_frozen(now: datetime) -> None:
    text = chat_template_utils.render_jinja_template(
        conversations=[[]], chat_template="{{ strftime_now('%Y-%m-%d') }}"
    )
    text = text[0] if isinstance(text, tuple) else text
    if text != [f"{now:%Y-%m-%d}"]:
        raise Refused(
            f"{installed_release()} prints {text} as the date in a chat template, expected "
            f"{now:%Y-%m-%d}: its clock cannot be stopped, so prompts would differ from day to day"
        )
