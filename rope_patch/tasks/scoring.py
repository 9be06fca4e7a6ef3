"""Scoring of answers: RULER's two rules for generated text, likelihood, and choice."""

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


def _with_target_likelihood(score: float, response: Any) -> dict[str, float]:
    scores = {"score": score}
    # Our own language model scores the target from the same pass; lm-eval's others don't.
    if (log_likelihood := getattr(response, "target_log_likelihood", None)) is not None:
        scores["target_log_likelihood"] = log_likelihood
    return scores
