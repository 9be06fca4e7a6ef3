"""Prompts that tell rotations apart: segments that come back at a far distance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.tasks.texts import read_text

PAIR = "pair"
_SEGMENT = 24  # least tokens of a segment that is repeated


@dataclass(frozen=True)
class ProbePrompt:
    """A prompt, and the tokens whose log-probabilities are compared.

    Attributes:
        kind: How it was made.
        ids: Token ids.
        scored: Indices of the tokens to compare, at least 1.
        decoded_from: Tokens in the prefill, where an engine wrote the others one by one; None if
            all are a prompt.
    """

    kind: str
    ids: tuple[int, ...]
    scored: tuple[int, ...]
    decoded_from: int | None = None


class PromptMaker:
    """Makes prompts of token ids, the same ones for the same seed.

    Args:
        vocabulary: Ids that prompts are made of.
        first: The id that a text begins with; None for none.
        text: Ids of a long natural text; empty where there is no tokenizer.
        seed: Another seed makes other prompts.
    """

    def __init__(
        self, vocabulary: Sequence[int], first: int | None, text: Sequence[int], seed: int
    ) -> None:
        self.vocabulary = vocabulary
        self.text = text
        self._start = [] if first is None else [first]
        self._seed, self._made = seed, Counter[str]()

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of long prompts that can be made."""
        return ["far", "near", *(["text"] if len(self.text) > 1024 else [])]

    def make(self, kind: str, length: int) -> ProbePrompt:
        """Return a prompt.

        Args:
            kind: "pair" for two tokens; "far" for a random segment that comes back at the end;
                "near" for segments that come back at all distances; "text" for natural text whose
                beginning comes back at the end.
            length: Tokens.
        """
        # Prompts of one kind are the same ones whatever other kinds were made before.
        self._random = random.Random(f"{self._seed} {kind} {self._made[kind]}")
        self._made[kind] += 1
        if kind == PAIR:  # the second token sees one key, and no rotation changes that
            return ProbePrompt(kind, tuple(self._draw(2)), (1,))
        if kind == "near":
            body = self._near(length)
        else:
            share = max(_SEGMENT, length // 4)
            source = self._draw if kind == "far" else self._read
            beginning = source(max(1, length - share))
            body = beginning + beginning[:share]
        ids = tuple((self._start + body)[: max(length, 2)])
        return ProbePrompt(kind, ids, tuple(range(1, len(ids))))

    def _draw(self, count: int) -> list[int]:
        return self._random.choices(self.vocabulary, k=count)

    def _read(self, count: int) -> list[int]:
        start = self._random.randrange(max(1, len(self.text) - count))
        piece = list(self.text[start : start + count])
        return piece + self._draw(count - len(piece))

    def _near(self, length: int) -> list[int]:
        """Return random tokens in which segments come back after shorter and longer distances."""
        body = self._draw(2 * _SEGMENT)
        while len(body) < length:
            start = self._random.randrange(len(body) - _SEGMENT)
            body += self._draw(self._random.randrange(1, 2 * _SEGMENT))
            body += body[start : start + _SEGMENT]
        return body


def make_prompt_maker(config: Any, tokenizer: Any, seed: int) -> PromptMaker:
    """Return the maker of prompts for a model.

    Args:
        config: The text config.
        tokenizer: The model's tokenizer; None if it has none.
        seed: Another seed makes other prompts.
    """
    special = {
        each
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
        for each in _as_list(getattr(config, name, None))
    }
    size, text = config.vocab_size, []
    if tokenizer is not None:
        size = min(size, len(tokenizer))
        special |= set(tokenizer.all_special_ids)
        start = seed % 8 * 40_000
        excerpt = read_text("emma")[start : start + 60_000]
        text = tokenizer(excerpt, add_special_tokens=False)["input_ids"]
        text = [each for each in text if each < size and each not in special]
    vocabulary = [each for each in range(min(3, size // 2), size) if each not in special]
    first = next(iter(_as_list(getattr(config, "bos_token_id", None))), None)
    return PromptMaker(vocabulary, first, text, seed)


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if each >= 0]
