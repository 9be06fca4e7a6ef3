"""Attention whose distances go through a position map, in plain torch: the truth of its kernel.

Rotated queries and keys are turned again, by shifts of their positions. The keys of a query fall
into regions, each with shifts of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rope_patch.ops.reference import rotate


@dataclass(frozen=True, eq=False)
class AttentionRegions:
    """The keys that queries see, in R intervals of slots each, and by what both are turned there.

    B is 1 where all rows are alike. N is 1, or the number of equal parts of the rotated pairs that
    have shifts of their own.

    Attributes:
        start: First slot of each query's keys, int32 `[B, R, Q]`.
        stop: The slot behind the last one, at most S; no key where it is not above `start`. No key
            is in two regions of a query.
        query_shift: Added to the position of a query, int64 `[B, R, Q, N]`.
        key_shift: Added to the position of a key, int64 `[B, R, S, N]`.
        turns_keys: 1 for regions with a key whose shift is not 0, int32 `[R]`.
        packed_freqs: Frequencies in units of the shifts, `[P + 1]`; see `pack_frequencies`. The
            attention factor is not applied.
    """

    start: torch.Tensor
    stop: torch.Tensor
    query_shift: torch.Tensor
    key_shift: torch.Tensor
    turns_keys: torch.Tensor
    packed_freqs: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        """Return how many dimensions of a head rotate."""
        return 2 * (self.packed_freqs.shape[-1] - 1)

    @property
    def parts(self) -> int:
        """Return how many parts of the pairs have shifts of their own."""
        return self.query_shift.shape[-1]

    def to(self, device: torch.device) -> AttentionRegions:
        """Return the regions on a device."""
        return AttentionRegions(**{name: x.to(device) for name, x in vars(self).items()})

    def turn(self, x: torch.Tensor, shift: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """Return queries or keys `[B, H, S, D]`, turned by shifts `[B, S, N]` with exact angles."""
        pairs = len(self.packed_freqs) - 1
        phase = shift.repeat_interleave(pairs // self.parts, -1) * self.packed_freqs[:-1]
        angle = phase.double()[:, None] * (math.tau / 2.0**64)
        wide = torch.promote_types(x.dtype, torch.float32)
        return rotate(x, angle.cos().to(wide), angle.sin().to(wide), interleaved=interleaved)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    regions: AttentionRegions,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the regions; all logits are stored.

    Args:
        query: Rotated queries, `[B, H, Q, D]`.
        key: Rotated keys, `[B, K, S, D]`; H is a multiple of K.
        value: `[B, K, S, E]`.
        regions: What queries see.
        scaling: Factor of the logits.
        softcap: Logits become softcap * tanh(logits / softcap).
        sinks: A logit for each head that no value goes with, `[H]`.
        interleaved: See `rope_patch.ops.rope`.

    Returns:
        Output `[B, H, Q, E]`, 0 for queries without keys, and the log-sum-exp of the logits, sinks
        included, `[B, H, Q]`, -inf where there are none.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    slots = torch.arange(key.shape[2], device=key.device)
    scores = query.new_full((*query.shape[:3], len(slots)), -torch.inf)
    for region in range(regions.start.shape[1]):
        turned_query = regions.turn(query, regions.query_shift[:, region], interleaved)
        turned_key = regions.turn(key, regions.key_shift[:, region], interleaved)
        start, stop = (x[:, None, region, :, None] for x in (regions.start, regions.stop))
        inside = (slots >= start) & (slots < stop)
        scores = torch.where(inside, turned_query @ turned_key.transpose(-1, -2) * scaling, scores)
    if softcap is not None:
        scores = torch.where(scores.isneginf(), scores, torch.tanh(scores / softcap) * softcap)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    is_blind = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(is_blind, 0).softmax(-1).masked_fill(is_blind, 0)
    return weights[..., : len(slots)] @ value, scores.detach().logsumexp(-1)
