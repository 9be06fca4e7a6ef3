"""Copying: continue a quotation of words from some depth of the text, word by word.

"Repeat After Me" (arXiv:2402.01032) takes copying to separate models with a full memory of the text
from others. Here the words have a random order: no model can guess the next one, or know it from a
novel in the training data.
"""

from __future__ import annotations

from typing import Any

from rope_patch.tasks import samples, scoring

ROOM = 128  # 24 words; rare words take several tokens
CUE = 8  # words of the passage that are quoted; a text does not have them in this order twice
LONGEST = 40  # more words might not fit the room

PROMPT = (
    "Below are words in no order. I will quote some that stand next to each other; go on with the "
    "words that follow them, one by one.\n{words}\nThe quoted words, and those that follow them:"
)

_VOCABULARY = 20_000  # words of a novel, before repetitions are dropped


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_copy; the arguments are those of `samples.build` and `span`.

    `span` (32 words unless given) is the length of the passage: 8 words are quoted, as the
    beginning of the answer, and the others are wanted.
    """
    return samples.build(generate, "rp_copy", ROOM, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for another passage.

    Raises:
        ValueError: A span outside of what the quotation and the room allow, or too few words.
    """
    span = int(text.options.get("span", 32))
    if not CUE < span <= LONGEST:
        raise ValueError(f"span must be {CUE + 1} to {LONGEST} words, got {span}")
    vocabulary = sorted(
        {
            word
            for word in text.word_source()(_VOCABULARY)
            if _is_plain(word) and 3 <= len(word) <= 8
        }
    )
    if len(vocabulary) < 100:
        raise ValueError(
            f"rp_copy needs a text with at least 100 different words of 3 to 8 small letters, got "
            f"{len(vocabulary)}: give another text"
        )
    passages = [text.rng.choices(vocabulary, k=span) for _ in text.depths]
    placed = sorted(zip(text.depths, passages, strict=True), key=lambda at: at[0])
    others: list[str] = []

    def words(n: int) -> str:
        while len(others) < n:  # made when needed: only the fitting of the length knows how many
            others.append(text.rng.choice(vocabulary))
        sequence = others[:n]
        for depth, passage in reversed(placed if text.planted else []):
            at = round(depth * n / 100)
            sequence[at:at] = passage  # from the back: no place moves
        return " ".join(sequence)

    def draft(passage: list[str], depth: int) -> samples.SampleDraft:
        rest = " ".join(passage[CUE:])
        return samples.SampleDraft(
            prompt=lambda n: PROMPT.format(words=words(n)),
            prefix=" ".join(passage[:CUE]),
            answers=[rest],
            target=rest,
            depth=depth,
        )

    return [draft(*sample) for sample in zip(passages, text.depths, strict=True)]


def copied(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return the share of the target's words written in order, up to the first mistake."""
    target, written = doc["target"].split(), str(results[0]).split()
    right = 0
    while right < min(len(target), len(written)) and target[right] == written[right]:
        right += 1
    return scoring.all_answers(doc, results) | {"score": right / len(target)}


def _is_plain(word: str) -> bool:
    return word.isalpha() and word.islower()
