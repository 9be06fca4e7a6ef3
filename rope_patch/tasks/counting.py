"""Counting: sentences of one kind all over the text, and the question how many there are.

One look-up finds one of them; the answer needs them all. So in Counting-Stars (arXiv:2403.11802),
with other sentences, and with a number that says nothing about the text's length.
"""

from __future__ import annotations

from typing import Any

from rope_patch.tasks import samples
from rope_patch.tasks.nonliteral import between_sentences
from rope_patch.tasks.scoring import NUMBERS

ROOM = 16  # a number, and some words around it
COUNTS = range(2, 13)

PROMPT = (
    "Somebody left a number of things in the places of the story below. Count them while you read; "
    "I will ask how many there are of one kind.\n{story}\nHow many {kind}s were left somewhere in "
    "the story? Answer with the number."
)
NEEDLE = "A {kind} was left {place}."
PREFIX = "The number of {kind}s that were left is"

_COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "purple",
    "white",
    "black",
    "silver",
    "golden",
    "pink",
]
_THINGS = [
    "lantern",
    "kite",
    "drum",
    "barrel",
    "trumpet",
    "saddle",
    "tent",
    "wagon",
    "rocket",
    "balloon",
]
KINDS = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
# fmt: off
PLACES = [
    "behind the mill", "in the cellar", "under the bridge", "on the staircase", "by the well",
    "at the crossroads", "in the orchard", "near the lighthouse", "on the roof", "by the chapel",
    "in the attic", "at the harbour", "in the stable", "by the fountain", "under the oak",
    "in the library", "on the pier", "beside the brook", "near the quarry", "at the market",
]
# fmt: on


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_count; the arguments are those of `samples.build`."""
    return samples.build(generate, "rp_count", ROOM, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for another kind of thing.

    Every text, the control's too, has one further kind that no question asks for. So counting all
    sentences from outside the story gives a wrong number.

    Raises:
        ValueError: More samples of one text than there are kinds.
    """
    sample_count = len(text.depths)
    if sample_count >= len(KINDS):
        raise ValueError(
            f"rp_count asks at most {len(KINDS) - 1} questions about a text, got "
            f"per_text {sample_count}"
        )
    kinds = text.rng.sample(KINDS, sample_count + 1)
    counts = [text.rng.choice(COUNTS) for _ in kinds]
    needles = []
    for kind, count in zip(kinds, counts, strict=True):
        if text.planted or kind == kinds[-1]:
            for i, place in enumerate(text.rng.sample(PLACES, count)):
                # One in every part of the text, of as many parts as there are sentences.
                depth = 100 * (i + text.rng.random()) / count
                needles.append((depth, NEEDLE.format(kind=kind, place=place)))
    # Stories say numbers, too: the control's does not say those that are asked for.
    asked = () if text.planted else {w for n in counts[:-1] for w in (str(n), NUMBERS[n])}
    words = text.word_source(asked)

    def draft(kind: str, count: int) -> samples.SampleDraft:
        return samples.SampleDraft(
            prompt=lambda n: PROMPT.format(story=between_sentences(words(n), needles), kind=kind),
            prefix=PREFIX.format(kind=kind),
            answers=[str(count)],
            target=NUMBERS[count],
        )

    return [draft(kind, count) for kind, count in zip(kinds[:-1], counts[:-1], strict=True)]
