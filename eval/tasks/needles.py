"""Single needles in a haystack: token-exact prompts, built offline, the same on every run.

Unlike RULER's own builder, every sample has its own random generator (so it does not depend on
which others are built), says its depth and length, and is as long as asked to the token; the
haystack is one of the novels that come with the package.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rope_patch.eval import texts

# RULER's wording for one needle (NVIDIA/RULER, Apache-2.0).
NEEDLE = "One of the special magic numbers for {key} is: {answer}."
PROMPT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the number afterwards.\n{haystack}\nWhat is the special magic number for {key} "
    "mentioned in the provided text?"
)
PREFIX = "The special magic number for {key} mentioned in the provided text is"

_SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"')

DEPTHS = (10, 50, 90)
ANSWER_ROOM = 32  # tokens that generation may take; they count towards the length


def build(
    tokenizer: Any = None,
    length: int = 4096,
    samples: int | None = None,
    depths: Sequence[int] = DEPTHS,
    seed: int = 42,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Builds the samples of one length, as lm-eval's `custom_dataset`.

    Args:
        tokenizer: The model's tokenizer or its name; `pretrained` is taken if there is none.
        length: Tokens of prompt and answer together.
        samples: How many; one a depth unless given. Depths take turns, so every first few samples
            cover all of them.
        depths: Where the needle goes, in percent of the haystack.
        seed: Another seed makes other samples.
        pretrained: The model's name, which lm-eval passes along.

    Returns:
        `{"test": dataset}` with the columns input, gen_prefix, answer, answer_tokens, key, length,
        tokens, depth, text, id.

    Raises:
        ValueError: A length too short for the prompt's own words, or a depth outside 0 to 100.
    """
    from datasets import Dataset

    if tokenizer is None or isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer or pretrained)
    if wrong := [depth for depth in depths if not 0 <= depth <= 100]:
        raise ValueError(f"depths are percentages from 0 to 100, got {wrong}")
    count = len(depths) if samples is None else samples
    words = {name: texts.read(name).split() for name in texts.names()}
    rows = [
        _sample(tokenizer, words, int(length), int(depths[i % len(depths)]), f"{seed}/{length}/{i}")
        for i in range(count)
    ]
    return {"test": Dataset.from_list(rows)}


def score_generation(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Whether the right answer was generated; its likelihood too, where the model reports it."""
    scores = {"hit": float(doc["answer"] in results[0])}
    if (likelihood := getattr(results[0], "answer_log_likelihood", None)) is not None:
        scores["answer_log_likelihood"] = likelihood
    return scores


def score_likelihood(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Whether greedy decoding begins with the right answer, and its log-likelihood."""
    log_likelihood, greedy = results[0]
    return {"hit": float(greedy), "answer_log_likelihood": float(log_likelihood)}


def _sample(
    tokenizer: Any, words: dict[str, list[str]], length: int, depth: int, identity: str
) -> dict[str, Any]:
    from wonderwords import RandomWord

    rng = random.Random(identity)
    pick = RandomWord(rng=rng)
    key = "-".join(pick.word(include_categories=[kind]) for kind in ("adjective", "noun"))
    answer = str(rng.randint(1_000_000, 9_999_999))
    name = rng.choice(sorted(words))
    novel = words[name]
    start = rng.randrange(len(novel))
    endless = novel[start:] + novel[:start]
    endless = endless * (1 + length // len(endless))  # shorter than asked for: repeated

    def prompt(count: int) -> str:
        text = _with_needle(endless[:count], NEEDLE.format(key=key, answer=answer), depth)
        return PROMPT.format(haystack=text, key=key)

    prefix = PREFIX.format(key=key)

    def size(count: int) -> int:
        return len(tokenizer(f"{prompt(count)} {prefix}", verbose=False).input_ids) + ANSWER_ROOM

    if size(0) > length:
        raise ValueError(
            f"a length of {length} tokens is too short for a needle: the prompt's own words, its "
            f"needle and the room for an answer take {size(0)} with this tokenizer"
        )
    low, high = 0, length  # a word takes at least one token
    while low < high:  # the most words that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= length else (low, middle - 1)
    return {
        "id": identity,
        "input": prompt(low),
        "gen_prefix": prefix,
        "answer": answer,
        "answer_tokens": len(tokenizer(f" {answer}", add_special_tokens=False).input_ids),
        "key": key,
        "length": length,
        "tokens": size(low),
        "depth": depth,
        "text": name,
    }


def _with_needle(words: list[str], needle: str, depth: int) -> str:
    """Puts the needle at the sentence's end nearest to `depth` percent of the words."""
    ends = [0, *(i + 1 for i, word in enumerate(words) if word.endswith(_SENTENCE_ENDS))]
    at = min(ends, key=lambda end: abs(100 * end - depth * len(words)))
    return " ".join([*words[:at], needle, *words[at:]])
