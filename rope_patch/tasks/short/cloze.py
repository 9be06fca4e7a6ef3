"""The last word of a passage from a novel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from rope_patch.tasks import texts
from rope_patch.tasks.short import choices

MAX_WORDS = 120  # words of a passage
_MIN_WORDS = 60
_MAX_LAST_SENTENCE = 10  # words of the last sentence: few, so that the answer takes the passage
_MIN_LETTERS = 5  # letters of the missing word: the commonest words are shorter
_SENTENCE_ENDS = (".", "!", "?")
_STOPS = ",;:.!?"


def build(**metadata: Any) -> dict[str, Any]:
    """Build lm-eval's `custom_dataset`; its metadata is what `choices.build` takes."""
    return choices.build(questions, "rp_short_cloze", **metadata)


def questions(rng: random.Random) -> Iterator[choices.ChoiceQuestion]:
    """Yield questions without end, each from some place in some novel."""
    names = texts.names()
    seen: set[tuple[str, int]] = set()
    while True:
        name = rng.choice(names)
        words = texts.split_words(name)
        end = rng.randrange(MAX_WORDS, len(words))
        # Few of thousands of places serve, so the cheapest check comes first.
        if not words[end].endswith(_SENTENCE_ENDS) or (name, end) in seen:
            continue
        right = _word_before_stop(words[end])
        if not right:
            continue
        passage = _from_a_sentence(words[end - MAX_WORDS : end])
        if len(passage) < _MIN_WORDS or right not in map(_without_stops, passage):
            continue
        if not any(word.endswith(_SENTENCE_ENDS) for word in passage[-_MAX_LAST_SENTENCE:]):
            continue
        # Words that close a phrase are of the kinds that the last word may be of.
        others = sorted({word for word in map(_word_before_stop, passage) if word} - {right})
        if len(others) < 3:
            continue
        rng.shuffle(others)
        others.sort(key=lambda word: _shared_ending(word, right), reverse=True)  # same forms first
        seen.add((name, end))
        stop = words[end].removeprefix(right)  # so that no choice begins another
        yield choices.ChoiceQuestion(
            context=" ".join(passage),
            right=right + stop,
            wrong=[word + stop for word in others[:3]],
        )


def _from_a_sentence(words: list[str]) -> list[str]:
    """Return the words after the first end of a sentence."""
    ends = (i for i, word in enumerate(words) if word.endswith(_SENTENCE_ENDS))
    return words[next(ends, len(words)) + 1 :]


def _without_stops(word: str) -> str:
    return word.rstrip(_STOPS)


def _word_before_stop(word: str) -> str:
    """Return the word before its stop, if it has one and may be asked for; otherwise nothing."""
    bare = _without_stops(word)
    usable = bare.isalpha() and bare.islower() and len(bare) >= _MIN_LETTERS
    return bare if usable and bare != word else ""


def _shared_ending(first: str, second: str) -> int:
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
