"""Recall of word pairs in noise, for models whose training was too short for needles in prose.

Keys and values are words that the model's own tokenizer has a token for, the noise is punctuation.
So eight pairs fit into a few dozen tokens, and a model needs no English to answer: it only has to
look back for the key and repeat the word after it (induction, arXiv:2209.11895).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rope_patch.tasks import samples

ROOM = 2  # tokens that an answer may take, as in rp_recall.yaml; they count towards the length
PAIRS = 8  # pairs of a key and its value in a text, at least
NOISE = "!\"#$%&'()*+,-./"

_WORDS = 1024  # a tokenizer's commonest words, which come first
_LEAST_WORDS = 4 * PAIRS  # words for keys and values, and as many others for the control


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_recall; the arguments are those of `samples.build`.

    The control has pairs too, of other words. A prompt ends within a pair's width of the length.
    """
    return samples.build(generate, "rp_recall", ROOM, **metadata)


def multiquery(**metadata: Any) -> dict[str, Any]:
    """Build samples that ask for all eight keys of a text at once; arguments as `samples.build`.

    The target gives the keys too: `value key value key value ...`, the first key is the prefix.
    """
    return samples.build(_generate_all_keys, "rp_recall_all", 2 * PAIRS, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for another key."""
    targets, prompt = _pairs(text, text.depths)
    decoys = tuple(value for _, value in targets[len(text.depths) :])
    return [
        samples.SampleDraft(
            prompt=prompt, prefix=key, answers=[value], target=value, depth=depth, decoys=decoys
        )
        for (key, value), depth in zip(targets, text.depths, strict=False)
    ]


def _generate_all_keys(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts that ask for all keys of a text, each in another order."""
    targets, prompt = _pairs(text, [])
    drafts = []
    for depth in text.depths:
        order = text.rng.sample(targets, len(targets))
        words = [word for pair in order for word in pair]
        drafts.append(
            samples.SampleDraft(
                prompt=prompt,
                prefix=words[0],
                answers=[value for _, value in order],
                target=" ".join(words[1:]),
                depth=depth,
            )
        )
    return drafts


def _pairs(
    text: samples.TextContext, depths: list[int]
) -> tuple[list[tuple[str, str]], Callable[[int], str]]:
    """Return the pairs that questions ask for, and the prompt by its number of noise words."""
    rng, number = text.rng, max(PAIRS, len(depths))
    keys, values = single_token_words(text.tokenizer)
    if 2 * number > len(values):
        raise ValueError(
            f"rp_recall asks for {number} words of each text, twice as many are needed, and this "
            f"tokenizer has {len(values)} for it: give a smaller per_text"
        )
    all_pairs = list(zip(rng.sample(keys, 2 * number), rng.sample(values, 2 * number), strict=True))
    targets, others = all_pairs[:number], all_pairs[number:]
    shares = [depth / 100 for depth in depths]
    # Pairs beyond the given depths have random places.
    shares += [rng.random() for _ in range(number - len(shares))]
    planted = targets if text.planted else others
    placed = sorted(zip(shares, planted, strict=True), key=lambda at: at[0])
    noise: list[str] = []

    def prompt(n: int) -> str:
        noise.extend(rng.choice(NOISE) for _ in range(len(noise), n))
        parts = noise[:n]
        for share, (key, value) in reversed(placed):
            parts.insert(round(share * n), f" {key} {value}")  # from the back: no place moves
        return "".join(parts)

    return targets, prompt


@lru_cache(maxsize=2)
def single_token_words(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Return words that are one token each behind a blank: keys, and as many values.

    Raises:
        ValueError: The tokenizer has too few of them.
    """
    words: list[str] = []
    before = tokenizer("x", add_special_tokens=False).input_ids
    for number in range(len(tokenizer)):
        token = tokenizer.convert_ids_to_tokens(number)
        word = token[1:] if isinstance(token, str) else ""
        # Behind a mark of a blank, which each kind of tokenizer writes in another way.
        if token[:1].isascii() or not re.fullmatch("[a-z]{2,}", word):
            continue
        if tokenizer(f"x {word}", add_special_tokens=False).input_ids == [*before, number]:
            words.append(word)
        if len(words) == _WORDS:
            break
    if len(words) < _LEAST_WORDS:
        raise ValueError(
            f"rp_recall is made of words that are one token each, at least {_LEAST_WORDS}; this "
            f"tokenizer has {len(words)} of them: give samples of your own"
        )
    half = len(words) // 2
    return words[:half], words[half : 2 * half]
