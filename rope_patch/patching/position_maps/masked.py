"""Attention at mapped positions with all logits of a block of queries at once.

It serves every mask, padding, gradients, softcap and dropout, and is what the fused parts are
tested against. Memory grows linearly with the keys, but for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.patching.position_maps.forward_view import ForwardView
from rope_patch.patching.position_maps.shift_tables import ShiftRotation

_LOGITS = 2**24  # of one block


@dataclass(frozen=True)
class LogitOptions:
    """What an attention does to its logits.

    Attributes:
        scaling: Factor of the logits.
        softcap: Logits become softcap * tanh(logits / softcap); None without.
        sinks: A logit for each head that no value goes with, `[H]`; None without.
        dropout: Probability that a weight becomes 0.
        packs_unmasked: Whether no mask leaves open where documents begin, as in flash attention,
            which reads it from positions.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    packs_unmasked: bool = False


def attend_masked(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    options: LogitOptions,
    *,
    needs_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention under any mask.

    Args:
        view: The forward's positions.
        rotation: The layer's rotation.
        query: Rotated queries, `[B, H, Q, D]`.
        key: Rotated keys of all tokens, `[B, K, S, D]`.
        value: `[B, K, S, E]`.
        mask: As transformers hands it to an attention function.
        options: What happens to the logits.
        needs_weights: Whether to return the attention weights.

    Returns:
        `[B, H, Q, E]` in the query's dtype, and weights `[B, H, Q, S]` or None.
    """
    rows, heads, steps, width = query.shape
    kv_heads, slots = key.shape[1:3]
    grouped = query.view(rows, kv_heads, heads // kv_heads, steps, width)
    turned_keys: dict[int, torch.Tensor] = {}
    block = max(16, _LOGITS // (rows * heads * slots))
    outputs, weights = [], []
    for first in range(0, steps, block):
        span = slice(first, min(first + block, steps))
        scores = _mapped_scores(view, rotation, grouped, key, span, turned_keys) * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        seen, bias = _visibility(mask, view, span, query, key, options)
        if bias is not None:
            scores = scores + bias
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        probabilities = _softmax(scores, options.sinks, kv_heads)
        probabilities = nn.functional.dropout(probabilities, options.dropout)
        outputs.append(torch.matmul(probabilities.to(value.dtype), value[:, :, None]))
        if needs_weights:
            weights.append(probabilities)
    output = torch.cat(outputs, dim=3).flatten(1, 2).to(query.dtype)
    return output, torch.cat(weights, dim=3).flatten(1, 2) if needs_weights else None


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
    places = view.keys.to(key.device)[:, None]
    for index, region in enumerate(view.regions):
        start, stop = (each[:, span, None].to(key.device) for each in (region.start, region.stop))
        inside = (places >= start) & (places < stop)
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


def _visibility(
    mask: Any,
    view: ForwardView,
    span: slice,
    query: torch.Tensor,
    key: torch.Tensor,
    options: LogitOptions,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return where queries see keys, and what is added to their logits; None for no change.

    Both broadcast to `[B, K, G, q, S]`. Regions hide later positions already.
    """
    if mask is None and view.is_consecutive:
        return None, None
    steps, slots = query.shape[2], key.shape[2]
    if hasattr(mask, "mask_mod"):  # flex attention's blocks
        from torch.nn.attention.flex_attention import create_mask

        mask = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], steps, slots, query.device)
    if mask is not None and mask.ndim == 4:
        # A view of heads alike, [B, 1, 1, q, S]; masks may go on behind the keys.
        part = mask[:, :, None, span, :slots]
        return (part, None) if part.dtype == torch.bool else (None, part)
    at = torch.arange(slots - steps, slots, device=query.device)[span, None]
    seen = (torch.arange(slots, device=query.device) <= at)[None]
    if mask is not None:  # flash attention's: which keys are tokens
        seen = seen & mask[:, None, -slots:].bool()
    elif options.packs_unmasked and slots == steps and len(query) == 1:
        # transformers packs single rows whose positions start anew, and not where they jump.
        positions = view.queries.to(query.device)
        document = (positions == positions.amin()).cumsum(1)
        seen = seen & (document[:, span, None] == document[:, None])
    return seen[:, None, None], None


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    """Return attention weights; 0 for queries that see nothing."""
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1)
        column = column.expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    is_blind = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(is_blind, 0), dim=-1).masked_fill(is_blind, 0)
