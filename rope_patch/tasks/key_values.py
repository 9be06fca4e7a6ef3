"""Key-value recall: a JSON object of UUIDs, and the key whose value is wanted.

The task is that of "Lost in the Middle" (arXiv:2307.03172), which HELMET (arXiv:2410.02694) kept
as one of the recall tasks that tell models apart. The wording is this project's own.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

from rope_patch.tasks import samples

ROOM = 48  # a UUID of 36 characters takes no more tokens than that

PROMPT = (
    "Below is a JSON object. I will give you one of its keys afterwards; answer with the value "
    "that belongs to exactly this key.\n{pairs}\nKey: {key}"
)
PREFIX = "Corresponding value:"


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_json_kv; the arguments are those of `samples.build` and `confusable`.

    `confusable` (0.25 unless given) is the share of the other pairs whose keys differ from a key
    that is asked for in two digits only. Prompts grow by whole pairs, so they end within one pair
    of the length.
    """
    return samples.build(generate, "rp_json_kv", ROOM, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one text: each asks for another key of the same object.

    Raises:
        ValueError: `confusable` is no share.
    """
    confusable = float(text.options.get("confusable", 0.25))
    if not 0 <= confusable <= 1:
        raise ValueError(f"confusable is a share of the pairs, from 0 to 1, got {confusable}")
    questions = [(_uuid(text.rng), _uuid(text.rng)) for _ in text.depths]
    # From the front: of several pairs at one depth, the first that is asked for comes first.
    placed = sorted(zip(text.depths, questions, strict=True), key=lambda at: at[0])
    others: list[tuple[str, str]] = []
    used = {key for key, _ in questions}

    def pairs(n: int) -> str:
        while len(others) < n:  # made when needed: only the fitting of the length knows how many
            near = text.rng.random() < confusable
            key = (
                _change_two_digits(text.rng, text.rng.choice(questions)[0])
                if near
                else _uuid(text.rng)
            )
            if key not in used:
                used.add(key)
                others.append((key, _uuid(text.rng)))
        entries = others[:n]
        for depth, pair in reversed(placed if text.planted else []):
            entries.insert(round(depth * n / 100), pair)  # from the back: no place moves
        return "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in entries) + "}"

    def draft(key: str, value: str, depth: int) -> samples.SampleDraft:
        return samples.SampleDraft(
            prompt=lambda n: PROMPT.format(pairs=pairs(n), key=key),
            prefix=PREFIX,
            answers=[value],
            target=value,
            depth=depth,
        )

    return [draft(*pair, depth) for pair, depth in zip(questions, text.depths, strict=True)]


def _uuid(rng: random.Random) -> str:
    return str(UUID(int=rng.getrandbits(128)))


def _change_two_digits(rng: random.Random, key: str) -> str:
    """Return the key with two of its digits changed."""
    digits = list(key)
    for i in rng.sample([i for i, digit in enumerate(key) if digit != "-"], 2):
        digits[i] = rng.choice([digit for digit in "0123456789abcdef" if digit != key[i]])
    return "".join(digits)
