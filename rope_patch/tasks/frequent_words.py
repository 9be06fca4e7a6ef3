"""RULER's two aggregation tasks: the most common words of a list, the most frequent of a text.

Their answers are all over the text: samples have no depth and no control, and never share a text.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from string import ascii_lowercase
from typing import Any

from rope_patch.tasks import samples

# Tokens that generation may take; they count towards the length.
COMMON_ROOM = 120
FREQUENT_ROOM = 50

# RULER's wording (NVIDIA/RULER, Apache-2.0).
COMMON_PROMPT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
FREQUENT_PROMPT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
FREQUENT_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)

COMMON = 10  # most common words that the first task asks for
# RULER's repeats of common and of other words, and how many other words its example has.
_LONG_SIZES = {"example": (10, 3, 30), "list": (30, 3)}
_SHORT_SIZES = {"example": (3, 1, 10), "list": (6, 1)}
_LONG_LENGTH = 4096  # tokens from which on RULER's sizes for long texts hold

_NOISE = "..."  # RULER's most frequent word, which does not count
_LETTERS = 6
# From so many words on the third answer is at least two ahead of the word behind it.
_MIN_FREQUENT_WORDS = 144


def common_words(**metadata: Any) -> dict[str, Any]:
    """Return samples of rp_cwe (RULER, arXiv:2404.06654), its one-shot example in front.

    `per_text` is 1 whatever the metadata say: RULER's list has one question.

    Args:
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `samples.build`, or a control (`planted=False`), which this task has not.
    """
    return samples.build(_generate_common, "rp_cwe", COMMON_ROOM, **metadata | {"per_text": 1})


def frequent_words(**metadata: Any) -> dict[str, Any]:
    """Return samples of rp_fwe (RULER, arXiv:2404.06654): zeta frequencies with alpha 2.

    `per_text` is 1 whatever the metadata say: RULER's text has one question.

    Args:
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `samples.build`, or a control (`planted=False`), which this task has not.
    """
    return samples.build(_generate_frequent, "rp_fwe", FREQUENT_ROOM, **metadata | {"per_text": 1})


def _generate_common(text: samples.TextContext) -> list[samples.SampleDraft]:
    _refuse_control(text, "rp_cwe")
    rng = text.rng
    sizes = _SHORT_SIZES if text.length < _LONG_LENGTH else _LONG_SIZES
    words = rng.sample(_vocabulary(), len(_vocabulary()))
    often, seldom, others = sizes["example"]
    shown, words = words[:COMMON], words[COMMON:]
    entries = _shuffle_entries(shown, often, words[:others] * seldom, rng)
    example = f"{COMMON_PROMPT.format(context=_number_words(entries))} {COMMON_PREFIX} "
    example += f"{_number_words(shown)}\n"
    often, seldom = sizes["list"]
    common, words = words[others : others + COMMON], words[others + COMMON :]
    order = rng.random()

    def prompt(units: int) -> str:
        # At least as many other words as common ones, so that there is a difference to find.
        other = [_other(words, i // seldom) for i in range(COMMON * seldom + units)]
        entries = _shuffle_entries(common, often, other, random.Random(f"{order}/{units}"))
        return example + COMMON_PROMPT.format(context=_number_words(entries))

    target = _number_words(common)
    return [samples.SampleDraft(prompt=prompt, prefix=COMMON_PREFIX, answers=common, target=target)]


def _shuffle_entries(
    common: list[str], repeats: int, other: list[str], rng: random.Random
) -> list[str]:
    """Return all words in random order; the common words first appear in the given order."""
    entries = common * repeats + other
    rng.shuffle(entries)
    # RULER's answers have no order of their own. With a given order, the target's likelihood has a
    # meaning.
    renamed: dict[str, str] = {}
    for entry in entries:
        if entry in common:
            renamed.setdefault(entry, common[len(renamed)])
        if len(renamed) == len(common):
            break
    return [renamed.get(entry, entry) for entry in entries]


def _number_words(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def _other(words: list[str], i: int) -> str:
    """Return the i-th word of the list; pairs of words after its end, for texts of any length."""
    again, at = divmod(i, len(words))
    return f"{words[at]}-{words[(at + again) % len(words)]}" if again else words[at]


@lru_cache(maxsize=1)
def _vocabulary() -> list[str]:
    """Return RULER's words: the nouns, adjectives and verbs of wonderwords."""
    from wonderwords import RandomWord

    source = RandomWord()
    kinds = ("noun", "adjective", "verb")
    return sorted({word for kind in kinds for word in source.filter(include_categories=[kind])})


def _generate_frequent(text: samples.TextContext) -> list[samples.SampleDraft]:
    _refuse_control(text, "rp_fwe")
    rng = text.rng
    coded: dict[str, None] = {}
    while len(coded) < max(text.length // 50, 10):  # as RULER; at least ten, for some other words
        coded["".join(rng.choices(ascii_lowercase, k=_LETTERS))] = None
    vocabulary = [_NOISE, *list(coded)[1:]]
    order = rng.random()

    def prompt(units: int) -> str:
        ranks = list(islice(_zeta(len(vocabulary)), _MIN_FREQUENT_WORDS + units))
        random.Random(f"{order}/{units}").shuffle(ranks)
        return FREQUENT_PROMPT.format(context=" ".join(vocabulary[rank - 1] for rank in ranks))

    answers = vocabulary[1:4]
    target = " ".join(answers)
    return [
        samples.SampleDraft(prompt=prompt, prefix=FREQUENT_PREFIX, answers=answers, target=target)
    ]


def _zeta(ranks: int) -> Iterator[int]:
    """Yield ranks in the order in which their expected counts reach another whole number."""
    # In a text of n words RULER has rank k int(n / (zeta(2) k^2)) times: its j-th time comes at
    # n = zeta(2) j k^2. Ranks that are taken one by one make texts of any number of words, not only
    # of RULER's.
    upcoming = [(k * k, k) for k in range(1, ranks + 1)]
    while True:
        at, k = upcoming[0]
        yield k
        heapq.heapreplace(upcoming, (at + k * k, k))


def _refuse_control(text: samples.TextContext, task: str) -> None:
    if not text.planted:
        raise ValueError(
            f"{task} has no control: its answer is all of its text; take planted=False and "
            "closed_book=True for other tasks"
        )
