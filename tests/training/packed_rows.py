"""Packed rows of small random documents."""

import itertools
import random
from pathlib import Path

import torch

from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.data.packing import PackedRows

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
END = 1
LENGTH = 48
SETTINGS = {"row_length": LENGTH, "trained_length": 16, "seed": 0}
KEYS = ("input_ids", "labels", "position_ids")


def lengths(name, count=9, most=130):
    rng = random.Random(f"lengths {name}")
    return [rng.randrange(2, most) for _ in range(count - 1)] + [LENGTH + 5]


def make_rows(tokenizer, count, data, settings=SETTINGS, **arguments):
    rows = PackedRows(DataArguments(data=data, **arguments), tokenizer, **settings)
    return list(itertools.islice(rows, count))


def tokens(rows):
    return [token for row in rows for token in row["input_ids"].tolist()]


def require_equal_rows(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert all(torch.equal(row[key], other[key]) for key in KEYS)
        assert row["row"] == other["row"]


def segments(row):
    """Return the pieces of a masked row, cut where positions restart."""
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    return [row["input_ids"][a:b] for a, b in zip(starts, [*starts[1:], LENGTH], strict=True)]


class CountingTokenizer:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0
        self.eos_token_id = tokenizer.eos_token_id

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.tokenizer(*args, **kwargs)
