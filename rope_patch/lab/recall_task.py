"""The task recall: key-value pairs in filler, asked for at the end, and repeated segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rope_patch.lab.task import Batch, Task, read_rows, rounded

PAIRS = 4
_SHORTEST = 32  # tokens of the first stage
_TOKENS, _LEAST_ROWS = 1536, 16
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
        return max(_LEAST_ROWS, _TOKENS // length)
