"""Stop rules: whether a generated answer's score is settled, so that no more text can change it.

Generation stops there: the answer is complete, or has failed. Each scoring function has a rule,
which holds for whatever the model writes next. A search of the whole text for its references
(`all_answers`) can fail only at the end of the room, because any later token may still begin the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rope_patch.tasks import (
    aggregated_lines,
    copying,
    dialogues,
    game_sessions,
    graphs,
    list_operations,
    scoring,
    standard_library,
)

StopRule = Callable[[dict[str, Any], str], bool]

# Last characters, which the next token may give another meaning: `12` may become `125` or `12.5`.
_UNSETTLED_END = 2


def stop_rule(score: Any) -> StopRule:
    """Return the stop rule of a task's scoring function: `rule(doc, text)` is True to stop.

    Args:
        score: The task's `process_results`.
    """
    return _RULES.get(score, _has_all)


def settled_part(text: str, stops: tuple[str, ...]) -> str:
    """Return a text without the end that the next token may change: half a character, half a stop.

    Args:
        text: The text so far.
        stops: Strings that end the answer and are cut off with all behind them.
    """
    text = text.rstrip("\ufffd")  # stands for the first bytes of a character
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]


def _is_open(_: dict[str, Any], text: str) -> bool:
    """Return False: RULERv2's rules read what follows the last "Answer:", paragraph or box."""
    return False


def _has_all(doc: dict[str, Any], text: str) -> bool:
    answers, lower = doc["answers"], text.lower()[:-_UNSETTLED_END]
    return bool(answers) and all(answer.lower() in lower for answer in answers)


def _has_any(doc: dict[str, Any], text: str) -> bool:
    lower = text.lower()[:-_UNSETTLED_END]
    return any(answer.lower() in lower for answer in doc["answers"])


def _has_number(_: dict[str, Any], text: str) -> bool:
    match = scoring.NUMBER.search(text.lower())
    return match is not None and match.end() + _UNSETTLED_END <= len(text.lower())


def _has_word(_: dict[str, Any], text: str) -> bool:
    return len(_whole_words(text)) > 0


def _has_line(_: dict[str, Any], text: str) -> bool:
    lines = text[:-_UNSETTLED_END].split("\n")[:-1]
    return any(line.strip() not in standard_library.NO_LINE for line in lines)


def _has_first_line(_: dict[str, Any], text: str) -> bool:
    return "\n" in text[:-_UNSETTLED_END].lstrip()


def _has_copy_or_mistake(doc: dict[str, Any], text: str) -> bool:
    words, target = _whole_words(text), doc["target"].split()
    return words[: len(target)] != target[: len(words)] or len(words) >= len(target)


def _has_closed_list(_: dict[str, Any], text: str) -> bool:
    return "]" in text.partition("[")[2][:-_UNSETTLED_END]


def _has_closed_value(_: dict[str, Any], text: str) -> bool:
    """Return whether the first list or number ends; one that is open may become the first one."""
    match = list_operations.ANSWER.search(text)
    if match is None or match.end() + _UNSETTLED_END > len(text):
        return False
    return "[" not in text[: match.start()]


def _has_reply_or_wrong_code(doc: dict[str, Any], text: str) -> bool:
    code, response = doc["target"].split(" ", 1)[0], text[:-_UNSETTLED_END].lstrip()
    if not response.startswith(code):
        return len(response) >= len(code)
    return "\n" in response[len(code) :].lstrip()


def _whole_words(text: str) -> list[str]:
    """Return the words that blanks end."""
    return re.findall(r"\S+(?=\s)", text[:-_UNSETTLED_END])


_RULES: dict[Any, StopRule] = {
    scoring.any_answer: _has_any,
    scoring.first_number: _has_number,
    standard_library.same_name: _has_word,
    standard_library.same_line: _has_line,
    **dict.fromkeys(
        (scoring.all_copies, scoring.last_copy, scoring.best_copy, scoring.boxed_letter), _is_open
    ),
    copying.copied: _has_copy_or_mistake,
    graphs.node_f1: _has_closed_list,
    list_operations.same_value: _has_closed_value,
    dialogues.repeated: _has_reply_or_wrong_code,
    aggregated_lines.same_words: _has_first_line,
    aggregated_lines.near_number: _has_first_line,
    aggregated_lines.same_date: _has_first_line,
    game_sessions.same_events: _has_first_line,
}
