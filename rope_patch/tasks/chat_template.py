"""The chat template of an instruct model around a question and the start of its answer."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from rope_patch.transformers_api.chat_templates import frozen_clock
from rope_patch.utils.errors import describe_error

CHAT_TEMPLATE = ("auto", "on", "off")

# Templates print today's date: Llama 3's unless it gets one, SmolLM3's by the clock. A date that
# stays makes the same prompts tomorrow, so that a run can be continued and compared.
_NOW = datetime(2024, 7, 26)
_SECONDS = 20.0  # a template takes milliseconds; a loop without an end must not hang a run


def resolve(choice: str, tokenizer: Any) -> bool:
    """Return whether questions are put into the tokenizer's chat template.

    Args:
        choice: `auto` (where the tokenizer has one), `on` or `off`.
        tokenizer: The model's.

    Raises:
        ValueError: Another choice, or `on` without a template.
    """
    if choice not in CHAT_TEMPLATE:
        raise ValueError(
            f"unknown chat template {choice!r}; expected one of {', '.join(CHAT_TEMPLATE)}"
        )
    has_template = getattr(tokenizer, "chat_template", None) not in (None, "", {})
    if choice == "on" and not has_template:
        raise ValueError(
            "a chat template was asked for, and this model's tokenizer has none: give "
            "--chat-template off, or add a chat_template to the tokenizer"
        )
    return choice != "off" and has_template


def render(tokenizer: Any, question: str, prefix: str) -> str:
    """Return a question as the user's turn, and the start of the answer as the assistant's.

    lm-eval makes the same text with `--apply_chat_template`.

    Args:
        tokenizer: The model's; it must have a template.
        question: The whole prompt, with the long text.
        prefix: What the model continues.
    """
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": prefix}]
    return apply(tokenizer, turns)


def apply(tokenizer: Any, turns: list[dict[str, str]], complete: bool = False) -> str:
    """Return a conversation in the tokenizer's template, with a clock that stands still.

    Args:
        tokenizer: The model's; it must have a template.
        turns: Messages with role and content.
        complete: Whether the last message is complete; else the model continues it.

    Raises:
        ValueError: The template fails, makes no text, or takes too long.
    """

    def fill() -> Any:
        return tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=complete,
            continue_final_message=not complete,
            date_string=_NOW.strftime("%d %b %Y"),
        )

    with frozen_clock(_NOW):
        text = _run_template(fill)
    if not isinstance(text, str):
        raise ValueError(_advice(f"it makes {type(text).__name__}, expected a text"))
    return text


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of the tokenizer's template, to record which one it was."""
    template = _run_template(tokenizer.get_chat_template)
    return f"sha256:{hashlib.sha256(template.encode()).hexdigest()}"


class _TookTooLong(BaseException):
    """Raised in the thread of a template that takes too long; no template can catch it."""


def _run_template(call: Callable[[], Any]) -> Any:
    """Return what a template's code returns; turn any error into one line with the next step."""
    # A template is a program of the checkpoint, so a timer in another thread ends one that runs too
    # long.
    thread, lock = threading.get_ident(), threading.Lock()
    is_over = interrupts = False

    def interrupt() -> None:
        nonlocal interrupts
        with lock:
            if not is_over:
                interrupts = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_TookTooLong)
                )

    timer = threading.Timer(_SECONDS, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return call()
        except _TookTooLong:
            interrupts = False
            raise
        finally:
            timer.cancel()
            with lock:
                is_over = True
            while interrupts:  # the exception is on its way, and must not arrive after this
                time.sleep(0.001)
    except _TookTooLong:
        raise ValueError(_advice(f"it did not end within {_SECONDS:g} s")) from None
    except Exception as error:
        raise ValueError(_advice(describe_error(error))) from error


def _advice(problem: str) -> str:
    return (
        f"the chat template of this model's tokenizer fails on a question ({problem}): ask in "
        "plain text by --chat-template off, or mend the template"
    )
