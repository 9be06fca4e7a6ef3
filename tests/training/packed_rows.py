"""Packed rows of small random documents."""

import itertools
import json
import random
from pathlib import Path

import torch

from rope_patch.training import DataArguments, PackedRows

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
END = 1
LENGTH = 48
SETTINGS = {"row_length": LENGTH, "trained_length": 16, "seed": 0}
KEYS = ("input_ids", "labels", "position_ids")


def lengths(name, count=9, most=130):
    rng = random.Random(f"lengths {name}")
    return [rng.randrange(2, most) for _ in range(count - 1)] + [LENGTH + 5]


def packed(tokenizer, data, settings=SETTINGS, **arguments):
    return PackedRows(DataArguments(data=data, **arguments), tokenizer, **settings)


def make_rows(tokenizer, count, data, settings=SETTINGS, **arguments):
    return list(itertools.islice(packed(tokenizer, data, settings, **arguments), count))


def resumed_rows(tokenizer, state, first, count, data, settings=SETTINGS, **arguments):
    """Return rows from `first` on, resumed from a state that went through JSON."""
    rows = packed(tokenizer, data, settings, **arguments)
    rows.resume(json.loads(json.dumps(state)), first)
    return list(itertools.islice(rows, count))


def tokens(rows):
    return [token for row in rows for token in row["input_ids"].tolist()]


def require_equal_rows(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert all(torch.equal(row[key], other[key]) for key in KEYS)
        assert row["row"] == other["row"]


def segments(row, length=LENGTH):
    """Return the pieces of a masked row, cut where positions restart."""
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    return [row["input_ids"][a:b] for a, b in zip(starts, [*starts[1:], length], strict=True)]


class CountingTokenizer:
    """A tokenizer that counts its calls, and cannot decode."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0
        self.eos_token_id = tokenizer.eos_token_id

    def __len__(self):
        return len(self.tokenizer)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.tokenizer(*args, **kwargs)
