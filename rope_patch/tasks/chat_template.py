"""The chat template of an instruct model around a question and the start of its answer."""

from __future__ import annotations

import hashlib
from typing import Any

CHAT_TEMPLATE = ("auto", "on", "off")

# Llama 3's template prints today's date unless it gets one. A date that stays makes the same
# prompts tomorrow, so that a run can be continued.
TEMPLATE_ARGUMENTS = {"date_string": "26 Jul 2024"}


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
    has_template = bool(getattr(tokenizer, "chat_template", None))
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
    return tokenizer.apply_chat_template(
        turns,
        tokenize=False,
        add_generation_prompt=False,
        continue_final_message=True,
        **TEMPLATE_ARGUMENTS,
    )


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of the tokenizer's template, to record which one it was."""
    template = tokenizer.get_chat_template()
    return f"sha256:{hashlib.sha256(template.encode()).hexdigest()}"
