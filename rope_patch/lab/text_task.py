"""The task text: the next character of Jane Austen's novels."""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import torch

from rope_patch.lab.task import Batch, Task, read_rows, rounded
from rope_patch.tasks import texts

TRAINED_ON = ("emma", "mansfield_park", "northanger_abbey", "sense_and_sensibility")
HELD_OUT = ("persuasion", "pride_and_prejudice")
_TOKENS, _LEAST_ROWS = 2048, 16
_OTHER = 0  # the id of characters that the novels to train on lack


@functools.lru_cache(maxsize=1)
def _characters() -> tuple[dict[str, int], torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return ids by character, the text to train on, and the held-out texts, all as ids."""
    trained = "".join(texts.read_text(name) for name in TRAINED_ON)
    ids = {character: i for i, character in enumerate(sorted(set(trained)), _OTHER + 1)}

    def encoded(text: str) -> torch.Tensor:
        return torch.tensor([ids.get(character, _OTHER) for character in text])

    return ids, encoded(trained), tuple(encoded(texts.read_text(name)) for name in HELD_OUT)


class TextTask(Task):
    """The next character of four novels; held-out excerpts come from two others.

    Attributes:
        length: Trained length, in characters.
        longest: Characters of an excerpt; shorter windows are cut from the same excerpts.
        edges: Positions that part the windows of the longest test for losses by position.
    """

    name: ClassVar[str] = "text"

    def __init__(self, length: int, longest: int, excerpts: int) -> None:
        self.length, self.longest = length, longest
        ids, self._train, held_out = _characters()
        self.vocabulary_size = len(ids) + 1
        self._rows = max(_LEAST_ROWS, _TOKENS // length)
        self._excerpts = _spread(held_out, longest, excerpts)
        self.edges = position_edges(length, longest)

    def batch(self, generator: torch.Generator, step: int) -> Batch:
        last = len(self._train) - self.length
        starts = torch.randint(last, (self._rows, 1), generator=generator)
        input_ids = self._train[starts + torch.arange(self.length)]
        return input_ids, input_ids

    def tokens(self, step: int) -> int:
        return self._rows * self.length

    def test_tokens(self, length: int) -> int:
        return len(self._excerpts) * (self.longest // length) * length

    def measure(self, model: Any, length: int) -> dict[str, Any]:
        windows = self.longest // length
        input_ids = self._excerpts[:, : windows * length].reshape(-1, length)
        losses = read_rows(model, input_ids, _character_losses)
        losses = losses.view(len(self._excerpts), windows, length - 1)
        scores = {
            "loss": rounded(losses.mean((1, 2))),
            "last_half": rounded(losses[:, :, length // 2 - 1 :].mean((1, 2))),
        }
        if length == self.longest:
            edges = self.edges
            # losses[..., p - 1] is of the character at position p.
            bands = [
                losses[:, :, max(low, 1) - 1 : high - 1].mean((1, 2))
                for low, high in itertools.pairwise(edges)
            ]
            scores["by_position"] = rounded(torch.stack(bands, 1))
        return scores


def _character_losses(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Return each character's loss but the first's, in nats, `[B, S - 1]`."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none"
    )


def position_edges(length: int, longest: int) -> list[int]:
    """Return where bands of positions begin and end: quarters of the trained length, then doubled.

    Args:
        length: Trained length.
        longest: The end of the last band.
    """
    edges = [0, length // 4, length // 2, length]
    while edges[-1] * 2 < longest:
        edges.append(edges[-1] * 2)
    return [*edges, longest] if longest > edges[-1] else edges


def _spread(held_out: tuple[torch.Tensor, ...], length: int, count: int) -> torch.Tensor:
    """Return excerpts at even distances, half of them from each text, `[count, length]`.

    Raises:
        ValueError: The texts are too short for so many.
    """
    per_text = -(-count // len(held_out))
    rows = []
    for text in held_out:
        if per_text * length > len(text):
            raise ValueError(
                f"{count} excerpts of {length:,} characters need {per_text * length:,} of each "
                f"held-out novel, one has {len(text):,}: give fewer excerpts or shorter tests"
            )
        gap = len(text) // per_text
        rows += [text[i * gap : i * gap + length] for i in range(per_text)]
    return torch.stack(rows[:count])
