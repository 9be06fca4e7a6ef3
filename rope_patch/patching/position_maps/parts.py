"""Attention at mapped positions by fused calls, one for each piece of a region."""

from __future__ import annotations

import functools

import torch

from rope_patch.patching.position_maps.forward_view import ForwardView
from rope_patch.patching.position_maps.fused_attention import MergedParts, attend_part
from rope_patch.patching.position_maps.position_record import TurnedKeys
from rope_patch.patching.position_maps.shift_tables import ShiftRotation

_STEP = 16  # queries of one call up to which turned keys are kept for the next


def attend_by_parts(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    *,
    layer: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention over consecutive positions; no logits are stored.

    Args:
        view: The forward's positions.
        rotation: The layer's rotation.
        query: Rotated queries, `[B, H, Q, D]`.
        key: Rotated keys of all tokens, `[B, K, S, D]`.
        value: `[B, K, S, E]`.
        scaling: Factor of the logits.
        layer: The layer's index, under which turned keys are kept for the next step.
        sinks: A logit for each head that no value goes with, `[H]`.

    Returns:
        `[B, H, Q, E]` in the query's dtype.
    """
    if query.shape[2] == 1:
        return _attend_step(view, rotation, query, key, value, scaling, layer, sinks)
    merged = MergedParts(query, value)
    turned_query = turned_key = None
    present = -1
    for piece in view.pieces():
        if piece.region != present:
            present = piece.region
            pieces = [each for each in view.pieces() if each.region == present]
            turned_query = _turn_queries(view, present, rotation, query)
            stop = max(each.keys.stop for each in pieces)
            turned_key = _turn_keys(view, present, rotation, key, stop, layer)
        assert turned_query is not None
        assert turned_key is not None
        mask = None
        if piece.band:
            rows = piece.queries.stop - piece.queries.start
            mask = _band_mask(rows, piece.band, query.device)
        part = attend_part(
            turned_query[:, :, piece.queries],
            turned_key[:, :, piece.keys],
            value[:, :, piece.keys],
            scaling,
            is_causal=piece.is_causal,
            mask=mask,
        )
        merged.add(piece.queries, *part)
    if sinks is not None:
        merged.add_sinks(sinks)
    return merged.output.to(query.dtype)


def _attend_step(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    layer: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `attend_by_parts` for one query: its few logits are stored, for one softmax."""
    rows, heads, _, width = query.shape
    shape = (rows, key.shape[1], heads // key.shape[1], width)
    pieces, parts = view.pieces(), []
    for piece in pieces:
        turned = _turn_queries(view, piece.region, rotation, query)
        keys = _turn_keys(view, piece.region, rotation, key, piece.keys.stop, layer)
        # Heads that share keys are rows of one product, which copies no keys.
        parts.append(turned.view(shape) @ keys[:, :, piece.keys].transpose(-1, -2))
    scores = torch.cat(parts, dim=-1).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, *shape[1:3], 1).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    lengths = [piece.keys.stop - piece.keys.start for piece in pieces]
    shares = weights[..., : sum(lengths)].split(lengths, dim=-1)
    output = sum(
        share @ value[:, :, piece.keys] for share, piece in zip(shares, pieces, strict=True)
    )
    return torch.as_tensor(output).view(rows, heads, 1, value.shape[-1]).to(query.dtype)


def _turn_queries(
    view: ForwardView, region: int, rotation: ShiftRotation, query: torch.Tensor
) -> torch.Tensor:
    tables = view.query_tables(region, rotation, query)
    return query if tables is None else rotation.turn(query, tables)


def _turn_keys(
    view: ForwardView,
    region: int,
    rotation: ShiftRotation,
    key: torch.Tensor,
    stop: int,
    layer: int | None,
) -> torch.Tensor:
    """Return the keys of a region, turned, of the slots before `stop` at least."""
    facts = view.regions[region]
    if facts.key_shift is None:
        return key
    record, steps = view.record, view.queries.shape[1]
    if record is None or layer is None or steps > _STEP or facts.key_rule is None:
        cos, sin = view.key_tables(region, rotation, key)
        return rotation.turn(key[:, :, :stop], (cos[:, :, :stop], sin[:, :, :stop]))
    kept = record.turned.get(layer)
    if kept is None or kept.rule != facts.key_rule or kept.buffer.dtype != key.dtype:
        kept = TurnedKeys(facts.key_rule, key.new_empty(*key.shape[:2], 0, key.shape[3]))
        record.turned[layer] = kept
    if kept.count < stop:
        new = slice(kept.count, stop)
        tables = rotation.tables(facts.key_shift[:, new].to(key.device), key)
        kept.extend(rotation.turn(key[:, :, new], tables))
    return kept.buffer


@functools.lru_cache(maxsize=8)
def _band_mask(rows: int, band: int, device: torch.device) -> torch.Tensor:
    """Return where query n sees keys n to n + band - 1."""
    offset = (
        torch.arange(rows + band - 1, device=device) - torch.arange(rows, device=device)[:, None]
    )
    return (offset >= 0) & (offset < band)
