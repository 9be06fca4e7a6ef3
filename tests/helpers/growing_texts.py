"""Read growing texts in the ways that tests of caches share, and count what a device waits for."""

import contextlib
from unittest import mock

import torch

from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TRAINED

PROMPT = 60  # tokens, which text of up to END tokens follows, token by token
END = 80  # stepped frequencies change after 64 and 76 tokens
assert PROMPT < TRAINED < END < 2 * TRAINED
LONGROPE = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
# Frequencies that change in steps, at every token and once.
LENGTH_METHODS = {
    "dynamic": {},
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "longrope": LONGROPE,
}


def positions_of(mask):
    """Return the position of each token, `[B, S]`, from which padding is left out."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def read_in_parts(model, ids, parts, cache, mask=None, positions=None):
    """Return logits `[B, S, vocab]` of the tokens that the cache does not have yet.

    Args:
        model: A model, or a compiled one.
        ids: All tokens, those in the cache included.
        parts: Lengths of the first parts; what they leave is read token by token.
        cache: A cache, which may be filled.
        mask: Which of `ids` are tokens; their positions are given then.
        positions: Positions to give instead.
    """
    given = {} if positions is None else {"position_ids": positions}
    if mask is not None:
        given = {"position_ids": positions_of(mask)} | given
    start, logits = int(cache.get_seq_length()), []
    parts = [*parts, *[1] * (ids.shape[1] - start - sum(parts))]
    for length in parts:
        end = start + length
        own = {name: value[:, start:end] for name, value in given.items()}
        if mask is not None:
            own["attention_mask"] = mask[:, :end]
        logits.append(model(ids[:, start:end], past_key_values=cache, **own).logits)
        start = end
    return torch.cat(logits, dim=1)


@contextlib.contextmanager
def position_reads():
    """Record the shapes of integers that are read from their device, for which a GPU waits."""
    shapes = []
    tolist, to = torch.Tensor.tolist, torch.Tensor.to

    def recording_tolist(self):
        if self.dtype == torch.int64 and self.numel():
            shapes.append(tuple(self.shape))
        return tolist(self)

    def recording_to(self, *args, **kwargs):
        if self.dtype == torch.int64 and args[:1] == ("cpu",):
            shapes.append(tuple(self.shape))
        return to(self, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "tolist", recording_tolist),
        mock.patch.object(torch.Tensor, "to", recording_to),
    ):
        yield shapes
