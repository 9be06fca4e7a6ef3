"""Scoring of answers: the rules of RULER and RULERv2 for generated text, likelihood, and choice."""

from __future__ import annotations

import re
from typing import Any

# fmt: off
NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen"
]
# fmt: on
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand"
# A number with all its parts: 7.5 is not 7, 1,000 is not 1, twenty-one is not twenty.
NUMBER = re.compile(rf"\d+(?:[.,]\d+)*|\b(?:{'|'.join(NUMBERS)}|{_TENS})\b(?:-[a-z]+)?")

# What RULERv2's rules read (NVIDIA-NeMo/Skills, branch chsieh/ruler2). Tests compare with its code.
_COPIED_DOCUMENT = re.compile(r"Document \d+:(?:.*\n)+?\n")
_LAST_LETTER = re.compile(r".*\b([A-J])\b", re.DOTALL)
_STATED_LETTER = re.compile(r"answer[*_]{0,2}\s*:[\s*_]{0,2}\s*([a-z])(?![a-z0-9])", re.IGNORECASE)


def all_answers(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return the share of references that the text contains, in any case (string_match_all)."""
    written = str(results[0]).lower()
    hits = [answer.lower() in written for answer in doc["answers"]]
    return _with_target_likelihood(sum(hits) / len(hits), results[0])


def any_answer(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the text contains one of the references, in any case (string_match_part)."""
    written = str(results[0]).lower()
    return _with_target_likelihood(
        float(any(a.lower() in written for a in doc["answers"])), results[0]
    )


def first_number(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the first number in the text, in digits or words, is the reference."""
    match = NUMBER.search(str(results[0]).lower())
    number = match.group() if match else None
    if number in NUMBERS:
        number = str(NUMBERS.index(number))
    return _with_target_likelihood(float(number in doc["answers"]), results[0])


def all_copies(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return how well references are copied, their mean (RULERv2's match type `all`).

    A reference within the answer counts 1, another one 1 less its word error rate, 0 at least.
    """
    return _with_target_likelihood(_mean_copy(_final_answer(results[0]), doc), results[0])


def last_copy(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return the same of the answer's last paragraph (RULERv2's match type `2steps`)."""
    paragraph = _final_answer(results[0]).split("\n\n")[-1]
    return _with_target_likelihood(_mean_copy(paragraph, doc), results[0])


def best_copy(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return how well the best-copied reference is copied (RULERv2's match type `part`).

    Documents that the answer copies before an empty line do not count.
    """
    answer = _COPIED_DOCUMENT.sub("", _final_answer(results[0]))
    best = max(_copy_score(answer, reference) for reference in doc["answers"])
    return _with_target_likelihood(best, results[0])


def boxed_letter(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    r"""Return 1 if the last \boxed{} has the right letter (RULERv2's multiple choice).

    Without a box, the letter after the last "Answer:" counts.
    """
    written = str(results[0])
    letter = _last_box(written)
    if letter is None:
        letter = next(reversed(_STATED_LETTER.findall(written)), None)
    elif len(letter) != 1 and (match := _LAST_LETTER.match(letter)):
        letter = match[1]
    return _with_target_likelihood(float(letter == doc["answers"][0]), results[0])


def likelihood(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if greedy decoding begins with the target, and its log-likelihood in nats."""
    log_likelihood, greedy = results[0]
    return {"score": float(greedy), "target_log_likelihood": float(log_likelihood)}


def choice(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the prompt makes the right choice likelier than the others, and its likelihood.

    A choice counts by what its log-likelihood gains from the prompt (PMI, Holtzman et al. 2021,
    arXiv:2104.08315). Else short choices and usual words would win, whatever the text says.

    Args:
        doc: The sample.
        results: The log-likelihood of each choice after the prompt, then of each without it.
    """
    log_likelihoods = [float(log_likelihood) for log_likelihood, _ in results]
    gold, count = int(doc["gold"]), len(doc["choices"])
    after, without = log_likelihoods[:count], log_likelihoods[count:]
    gains = [mine - prior for mine, prior in zip(after, without, strict=True)]
    right = all(gains[gold] > other for i, other in enumerate(gains) if i != gold)
    return {"score": float(right), "target_log_likelihood": after[gold]}


def _final_answer(written: Any) -> str:
    """Return what follows a model's thoughts, and the last "Answer:" in it."""
    return str(written).split("</think>")[-1].split("Answer:")[-1]


def _mean_copy(answer: str, doc: dict[str, Any]) -> float:
    scores = [_copy_score(answer, reference) for reference in doc["answers"]]
    return sum(scores) / len(scores)


def _copy_score(answer: str, reference: str) -> float:
    """Return 1 for a text with the reference in it, else 1 less its word error rate, or 0."""
    answer, reference = answer.lower(), reference.lower()
    if reference in answer:
        return 1.0
    words = reference.split()
    return max(0.0, 1 - _word_edits(answer.split(), words) / len(words)) if words else 0.0


def _word_edits(one: list[str], other: list[str]) -> int:
    """Return the least words to insert, leave out or replace that make one list the other."""
    row = list(range(len(other) + 1))
    for i, word in enumerate(one, start=1):
        before, row[0] = row[0], i
        for j, same in enumerate(other, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != same))
    return row[-1]


def _last_box(written: str) -> str | None:
    r"""Return what the last \boxed{} holds, braces in balance; None without one that is closed."""
    start = written.rfind("\\boxed")
    opened = 0
    for i in range(max(start, 0), len(written) if start >= 0 else 0):
        opened += (written[i] == "{") - (written[i] == "}")
        if written[i] == "}" and not opened:
            box = written[start : i + 1]
            return box[len("\\boxed{") : -1] if box.startswith("\\boxed{") else None
    return None


def _with_target_likelihood(score: float, response: Any) -> dict[str, float]:
    scores = {"score": score}
    # Our own language model scores the target from the same pass; lm-eval's others don't.
    if (log_likelihood := getattr(response, "target_log_likelihood", None)) is not None:
        scores["target_log_likelihood"] = log_likelihood
    return scores
