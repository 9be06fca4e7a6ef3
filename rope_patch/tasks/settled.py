"""Whether more text can change a generated answer's score, by the task's scoring.

Generation stops where none can: an answer is there, or has failed. Each rule holds for whatever the
model writes next. A search of the whole text for its references (`all_answers`) can fail only at
the end of the room, because any later token may still begin the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rope_patch.tasks import copying, dialogues, graphs, list_operations, scoring, standard_library

Rule = Callable[[dict[str, Any], str], bool]

_GUARD = 2  # characters: `12` may become `125` or `12.5`


def rule_of(score: Any) -> Rule:
    """Return the rule that belongs to a task's scoring function: `rule(doc, text)`.

    Args:
        score: The task's `process_results`.
    """
    return _RULES.get(score, _has_all)


def decided_part(text: str, stops: tuple[str, ...]) -> str:
    """Return the text without an end that the next token may change.

    Args:
        text: The text so far.
        stops: Strings that end the answer and are cut off with all behind them.
    """
    text = text.rstrip("\ufffd")  # the first bytes of a character
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]


def _has_all(doc: dict[str, Any], text: str) -> bool:
    answers, lower = doc["answers"], text.lower()[:-_GUARD]
    return bool(answers) and all(answer.lower() in lower for answer in answers)


def _has_any(doc: dict[str, Any], text: str) -> bool:
    lower = text.lower()[:-_GUARD]
    return any(answer.lower() in lower for answer in doc["answers"])


def _has_number(_: dict[str, Any], text: str) -> bool:
    match = scoring.NUMBER.search(text.lower())
    return match is not None and match.end() + _GUARD <= len(text.lower())


def _has_word(_: dict[str, Any], text: str) -> bool:
    return len(_whole_words(text)) > 0


def _has_line(_: dict[str, Any], text: str) -> bool:
    lines = text[:-_GUARD].split("\n")[:-1]
    return any(line.strip() not in standard_library.NO_LINE for line in lines)


def _has_copy_or_mistake(doc: dict[str, Any], text: str) -> bool:
    words, target = _whole_words(text), doc["target"].split()
    return words[: len(target)] != target[: len(words)] or len(words) >= len(target)


def _has_closed_list(_: dict[str, Any], text: str) -> bool:
    return "]" in text.partition("[")[2][:-_GUARD]


def _has_value(_: dict[str, Any], text: str) -> bool:
    """Return whether the first list or number ends; one that is open may become the first one."""
    match = list_operations.ANSWER.search(text)
    if match is None or match.end() + _GUARD > len(text):
        return False
    return "[" not in text[: match.start()]


def _has_reply_or_none(doc: dict[str, Any], text: str) -> bool:
    code, response = doc["target"].split(" ", 1)[0], text[:-_GUARD].lstrip()
    if not response.startswith(code):
        return len(response) >= len(code)
    return "\n" in response[len(code) :].lstrip()


def _whole_words(text: str) -> list[str]:
    """Return the words that blanks end."""
    return re.findall(r"\S+(?=\s)", text[:-_GUARD])


_RULES: dict[Any, Rule] = {
    scoring.any_answer: _has_any,
    scoring.first_number: _has_number,
    standard_library.same_name: _has_word,
    standard_library.same_line: _has_line,
    copying.copied: _has_copy_or_mistake,
    graphs.node_f1: _has_closed_list,
    list_operations.same_value: _has_value,
    dialogues.repeated: _has_reply_or_none,
}
