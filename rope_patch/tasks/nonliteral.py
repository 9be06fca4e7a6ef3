"""Needles that share no word with their question: finding one takes knowledge, not matching.

The idea is that of NoLiMa (arXiv:2502.05167); facts, names and wording are this project's own.
"""

from __future__ import annotations

import json
from bisect import bisect
from functools import lru_cache
from importlib.resources import files
from typing import Any

from rope_patch.tasks import samples, texts

ROOM = 16  # a name, and some words around it

PROMPT = (
    "Sentences about a few strangers are scattered through the story below; they are no part of "
    "it. I will ask about one of the strangers afterwards.\n{story}\nWhich of the strangers "
    "{question}? Answer with the name."
)
NEEDLE = "{name} {fact}."
PREFIX = "The name of the stranger is"

_ENDS = (".", "!", "?", '."', '!"', '?"', ".”", "!”", "?”")
_ABBREVIATIONS = ("Mr.", "Mrs.", "Dr.", "St.")


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_nonliteral; the arguments are those of `samples.build` and `distractors`.

    `distractors` (2 unless given) is a number of sentences about further strangers, which no
    question asks for. With them, finding a sentence from outside the story does not suffice. The
    control has them, too.
    """
    return samples.build(generate, "rp_nonliteral", ROOM, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for another of the strangers in it.

    Raises:
        ValueError: More strangers than there are facts or names that the story does not have.
    """
    data = facts()
    names = _names_not_in(tuple(data["names"]), text.texts)
    count = len(text.depths)
    distractors = int(text.options.get("distractors", 2))
    most = min(len(names), len(data["facts"]))
    if not 0 <= distractors <= most - count:
        raise ValueError(
            f"rp_nonliteral has facts and names for {most} strangers a text, got per_text {count} "
            f"and distractors {distractors}: take fewer"
        )
    chosen = text.rng.sample(data["facts"], count + distractors)
    strangers = text.rng.sample(names, count + distractors)
    depths = [*text.depths, *(text.rng.uniform(0, 100) for _ in range(distractors))]
    needles = [
        (depth, NEEDLE.format(name=name, fact=fact))
        for depth, name, (fact, _) in zip(depths, strangers, chosen, strict=True)
    ]
    words = text.word_source()
    planted = needles if text.planted else needles[count:]

    def draft(name: str, question: str, depth: int) -> samples.SampleDraft:
        return samples.SampleDraft(
            prompt=lambda n: PROMPT.format(
                story=between_sentences(words(n), planted), question=question
            ),
            prefix=PREFIX,
            answers=[name],
            target=name,
            depth=depth,
        )

    # zip without `strict`: the strangers that are left over are the distractors.
    return [
        draft(name, question, depth)
        for name, (_, question), depth in zip(strangers, chosen, text.depths, strict=False)
    ]


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """Return `names`, and `facts`: pairs of a statement on a stranger and its question."""
    path = files(__package__) / "nonliteral.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def between_sentences(words: list[str], sentences: list[tuple[float, str]]) -> str:
    """Put sentences between those of a text.

    Args:
        words: The text's.
        sentences: Each with its depth in percent of the words; it goes to the nearest sentence end.
    """
    ends = [0]
    for i, word in enumerate(words, start=1):
        if word.endswith(_ENDS) and word not in _ABBREVIATIONS:
            ends.append(i)
    placed = list(words)
    for depth, sentence in sorted(sentences, reverse=True):  # from the back: no place moves
        target = depth * len(words) / 100
        after = bisect(ends, target)
        at = min(ends[after - 1 : after + 1], key=lambda end: abs(end - target))
        placed.insert(at, sentence)
    return " ".join(placed)


@lru_cache(maxsize=8)
def _names_not_in(names: tuple[str, ...], sources: tuple[str, ...]) -> list[str]:
    """Return the names that occur nowhere in the texts, not even inside a word."""
    content = "\n".join(texts.read_text(source) for source in sources).lower()
    return [name for name in names if name.lower() not in content]
