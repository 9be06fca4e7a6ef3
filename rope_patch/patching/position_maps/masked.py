"""Attention at mapped positions with all logits of a block of queries at once.

It serves every mask, padding, gradients, softcap and dropout, and is what the fused parts are
tested against. Memory grows linearly with the keys, but for gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from rope_patch.patching.position_maps.forward_view import ForwardView
from rope_patch.patching.position_maps.shift_tables import ShiftRotation
from rope_patch.patching.position_maps.visibility import Visibility

_LOGITS = 2**24  # of one block


def attend_masked(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention under any mask.

    Args:
        view: The forward's positions.
        rotation: The layer's rotation.
        query: Rotated queries, `[B, H, Q, D]`.
        key: Rotated keys of all tokens, `[B, K, S, D]`.
        value: `[B, K, S, E]`.
        visibility: Which keys the queries see, with what else the attention function does.

    Returns:
        `[B, H, Q, E]` in the query's dtype, and weights `[B, H, Q, S]` where the function returns
        them.
    """
    call = visibility.call
    rows, heads, steps, _ = query.shape
    kv_heads, slots = key.shape[1:3]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    turned_keys: dict[int, torch.Tensor] = {}
    block = max(16, _LOGITS // (rows * heads * slots))
    outputs, weights = [], []
    for first in range(0, steps, block):
        span = slice(first, min(first + block, steps))
        scores = _mapped_scores(view, rotation, grouped, key, span, turned_keys) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        seen, bias = visibility.of(span)
        if bias is not None:
            scores = scores + bias
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        probabilities = _softmax(scores, call.sinks, kv_heads)
        probabilities = nn.functional.dropout(probabilities, call.dropout)
        outputs.append(torch.matmul(probabilities.to(value.dtype), value[:, :, None]))
        if call.returns_weights:
            weights.append(probabilities)
    output = torch.cat(outputs, dim=3).flatten(1, 2).to(query.dtype)
    return output, torch.cat(weights, dim=3).flatten(1, 2) if call.returns_weights else None


def _mapped_scores(
    view: ForwardView,
    rotation: ShiftRotation,
    grouped: torch.Tensor,
    key: torch.Tensor,
    span: slice,
    turned_keys: dict[int, torch.Tensor],
) -> torch.Tensor:
    """Return the logits of some queries, `[B, K, G, q, S]`, -inf outside of all regions."""
    wide = torch.promote_types(grouped.dtype, torch.float32)
    scores: torch.Tensor | None = None
    places, queries = view.keys.to(key.device)[:, None], view.queries.to(key.device)
    for index, region in enumerate(view.regions):
        start, stop = (each[:, span, None].to(key.device) for each in (region.start, region.stop))
        inside = (places >= start) & (places < stop)
        if not index:  # later keys, where a mask shows any, are met at their own distance
            inside |= places > queries[:, span, None]
        if index and not bool(inside.any()):
            continue
        query = grouped[:, :, :, span]
        if (tables := view.query_tables(index, rotation, query, span)) is not None:
            query = rotation.turn(query.flatten(1, 2), tables).unflatten(1, query.shape[1:3])
        if index not in turned_keys:
            tables = view.key_tables(index, rotation, key)
            turned_keys[index] = key if tables is None else rotation.turn(key, tables)
        logits = torch.matmul(query, turned_keys[index][:, :, None].transpose(-1, -2)).to(wide)
        below = torch.full_like(logits, -torch.inf) if scores is None else scores
        scores = torch.where(inside[:, None, None], logits, below)
    assert scores is not None
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    """Return attention weights; 0 for queries that see nothing."""
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1)
        column = column.expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    is_blind = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(is_blind, 0), dim=-1).masked_fill(is_blind, 0)
