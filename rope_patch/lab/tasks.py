"""The lab's tasks: recall of key-value pairs in filler, and the text of Jane Austen's novels."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rope_patch.tasks import texts

Batch = tuple[torch.Tensor, torch.Tensor]  # input ids and labels, `[B, S]`; labels of -100 are free
_TOKENS_AT_ONCE = 8192  # tokens that a forward pass reads in measurements


class Task(ABC):
    """Data to train on, and what is measured on data that no training saw.

    Attributes:
        name: "text" or "recall".
        vocabulary_size: Number of token ids.
    """

    name: ClassVar[str]
    vocabulary_size: int

    @abstractmethod
    def batch(self, generator: torch.Generator, step: int) -> Batch:
        """Return the batch of a step; it depends on the generator's state and the step alone."""

    @abstractmethod
    def tokens(self, step: int) -> int:
        """Return the tokens of a step's batch."""

    @abstractmethod
    def test_tokens(self, length: int) -> int:
        """Return the tokens that one measurement at a length reads."""

    @abstractmethod
    def measure(self, model: Any, length: int) -> dict[str, Any]:
        """Return what a model scores at a length: lists with an entry for each held-out sample.

        Args:
            model: A causal language model in eval mode.
            length: Tokens of each window.
        """


@torch.no_grad()
def read_rows(
    model: Any, input_ids: torch.Tensor, keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return what is kept of each row's logits, reading a part of the rows at once.

    Args:
        model: A causal language model.
        input_ids: The rows, `[B, S]`.
        keep: Gets logits `[rows, S, V]` and their input ids, and returns `[rows, ...]`.
    """
    parts = input_ids.split(max(1, _TOKENS_AT_ONCE // input_ids.shape[1]))
    return torch.cat([keep(model(input_ids=ids, use_cache=False).logits, ids) for ids in parts])


def rounded(values: torch.Tensor) -> Any:
    """Return numbers as nested lists with five decimals, which is far below what samples tell."""
    if values.ndim > 1:
        return [rounded(row) for row in values]
    return [round(value, 5) for value in values.tolist()]


PAIRS = 4
_SHORTEST = 32  # tokens of the shortest rows that training may begin with
_RECALL_TOKENS, _LEAST_ROWS = 1536, 16
_TEST_SEED = 1234


@dataclass(frozen=True)
class RecallVocabulary:
    """Disjoint ranges of token ids.

    Attributes:
        filler: What stands between pairs.
        keys: Keys of pairs.
        values: Values of pairs.
        size: Number of ids.
        whole_share: Share of the repeated segments that use all three ranges.
    """

    filler: range
    keys: range
    values: range
    size: int
    whole_share: float = 0.2


VOCABULARY = RecallVocabulary(range(16), range(16, 32), range(32, 48), 48)


def sample_ids(generator: torch.Generator, ids: range, batch: int, count: int) -> torch.Tensor:
    """Draw `count` different ids per row, uniformly, `[B, count]`."""
    return ids[0] + torch.rand(batch, len(ids), generator=generator).argsort(-1)[:, :count]


def zipf_filler(generator: torch.Generator, filler: range, batch: int, length: int) -> torch.Tensor:
    """Draw filler tokens by Zipf's law, the n-th id n times rarer than the first, `[B, S]`."""
    zipf = 1.0 / torch.arange(1, len(filler) + 1)
    indices = torch.multinomial(zipf, batch * length, replacement=True, generator=generator)
    return filler[0] + indices.view(batch, length)


def recall_batch(
    generator: torch.Generator, vocabulary: RecallVocabulary, batch: int, length: int, pairs: int
) -> Batch:
    """Return sequences of filler with key-value pairs in it, and queries at the end.

    Args:
        generator: The torch.Generator of all random choices.
        vocabulary: The ids.
        batch: Number of sequences B.
        length: Tokens per sequence S, queries included.
        pairs: Pairs per sequence P; the last 2P tokens are the queries, key value key value ...

    Returns:
        `(input_ids [B, S], labels [B, S])`; labels are the value at each queried value's own
        position (transformers shifts them by one itself) and -100 elsewhere.

    Raises:
        ValueError: The pairs do not fit into the length.
    """
    body = length - 2 * pairs
    if body < 2 * pairs:
        raise ValueError(f"length {length} has no room for {pairs} pairs, at least {4 * pairs}")
    input_ids = zipf_filler(generator, vocabulary.filler, batch, length)
    keys = sample_ids(generator, vocabulary.keys, batch, pairs)
    values = sample_ids(generator, vocabulary.values, batch, pairs)
    # P sorted places out of body - P, then one step apart: pairs of two tokens never overlap.
    places = sample_ids(generator, range(body - pairs), batch, pairs).sort(-1).values
    places = places + torch.arange(pairs)
    input_ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    order = sample_ids(generator, range(pairs), batch, pairs)
    input_ids[:, body::2] = keys.gather(1, order)
    input_ids[:, body + 1 :: 2] = values.gather(1, order)
    labels = torch.full_like(input_ids, -100)
    labels[:, body + 1 :: 2] = input_ids[:, body + 1 :: 2]
    return input_ids, labels


def repeat_batch(
    generator: torch.Generator, vocabulary: RecallVocabulary, batch: int, length: int
) -> Batch:
    """Return random tokens with a repeated segment of S // 3, at a different distance per row.

    Recall alone is not learned at this size: the loss stays flat. Repetition teaches a model to
    look back for what it saw. Most rows consist of filler ids only, so that keys and values mostly
    occur in recall.

    Returns:
        `(input_ids [B, S], labels [B, S])`; labels on the second occurrence after its first token
        (which nothing announces), -100 elsewhere.
    """
    size, low = length // 3, vocabulary.filler[0]
    is_whole = torch.rand(batch, 1, generator=generator) < vocabulary.whole_share
    id_counts = torch.where(is_whole, vocabulary.size - low, len(vocabulary.filler))
    input_ids = low + (torch.rand(batch, length, generator=generator) * id_counts).long()
    labels = torch.full_like(input_ids, -100)
    starts = sample_ids(generator, range(length - 2 * size + 1), batch, 2).sort(-1).values
    first = starts[:, :1] + torch.arange(size)
    second = starts[:, 1:] + size + torch.arange(size)
    segment = input_ids.gather(1, first)
    input_ids.scatter_(1, second, segment)
    labels.scatter_(1, second[:, 1:], segment[:, 1:])
    return input_ids, labels


class RecallTask(Task):
    """Half of each batch are pairs to recall, half repeated segments.

    Lengths grow while a model trains: 32 tokens in the first stage, doubled in each further one,
    up to the trained length. The stages' steps are fixed, so all encodings see the same data.

    Attributes:
        length: Trained length, in tokens.
        steps: Of the training.
    """

    name: ClassVar[str] = "recall"
    vocabulary_size = VOCABULARY.size

    def __init__(self, length: int, steps: int, sequences: int) -> None:
        self.length, self.steps, self._sequences = length, steps, sequences
        stages = [length]
        while stages[0] >= 2 * _SHORTEST:
            stages.insert(0, stages[0] // 2)
        self._stages = stages

    def stage_length(self, step: int) -> int:
        """Return the tokens of a step's rows; the first stage lasts twice as long as others."""
        share = step * (len(self._stages) + 1) // self.steps
        return self._stages[max(0, min(share, len(self._stages)) - 1)]

    def batch(self, generator: torch.Generator, step: int) -> Batch:
        length = self.stage_length(step)
        half = self._rows(length) // 2
        recall = recall_batch(generator, VOCABULARY, half, length, PAIRS)
        repeat = repeat_batch(generator, VOCABULARY, half, length)
        return torch.cat([recall[0], repeat[0]]), torch.cat([recall[1], repeat[1]])

    def tokens(self, step: int) -> int:
        length = self.stage_length(step)
        return self._rows(length) * length

    def test_tokens(self, length: int) -> int:
        return self._sequences * length

    def measure(self, model: Any, length: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(_TEST_SEED + length)
        input_ids, labels = recall_batch(generator, VOCABULARY, self._sequences, length, PAIRS)
        asked = slice(length - 2 * PAIRS, None, 2)  # keys; what follows one is its value
        logits = read_rows(model, input_ids, lambda logits, _: logits[:, asked])
        answers = labels[:, asked.start + 1 :: 2]
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), answers, reduction="none"
        )
        right = (logits.argmax(-1) == answers).float()
        return {"right": rounded(right.mean(1)), "loss": rounded(losses.mean(1))}

    def _rows(self, length: int) -> int:
        return max(_LEAST_ROWS, _RECALL_TOKENS // length)


TRAINED_ON = ("emma", "mansfield_park", "northanger_abbey", "sense_and_sensibility")
HELD_OUT = ("persuasion", "pride_and_prejudice")
_TEXT_TOKENS, _LEAST_TEXT_ROWS = 2048, 16
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
        self._rows = max(_LEAST_TEXT_ROWS, _TEXT_TOKENS // length)
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
    """Return excerpts at even distances, half of them from each text, `[count, length]`."""
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
