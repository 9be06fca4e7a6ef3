"""Attention at mapped positions by fused calls, one for each piece of a region."""

from __future__ import annotations

import functools

import torch

from rope_patch.patching.position_maps.forward_view import ForwardView
from rope_patch.patching.position_maps.fused_attention import MergedParts, attend_part
from rope_patch.patching.position_maps.position_record import TurnedKeys
from rope_patch.patching.position_maps.shift_tables import ShiftPositions, ShiftRotation

_AHEAD = 64  # keys turned together before they are far, so that few steps turn any


def attend_by_parts(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    *,
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
        sinks: A logit for each head that no value goes with, `[H]`.

    Returns:
        `[B, H, Q, E]` in the query's dtype.
    """
    slot = view.slot_of(key)
    if query.shape[2] == 1:
        return _attend_step(view, rotation, query, key, value, scaling, slot, sinks)
    merged = MergedParts(query, value)
    turned_query = turned_key = None
    present, rows = -1, slice(0)
    for piece in view.pieces():
        if piece.region != present:
            present = piece.region
            pieces = [each for each in view.pieces() if each.region == present]
            rows = slice(
                min(each.queries.start for each in pieces),
                max(each.queries.stop for each in pieces),
            )
            turned_query = _turn_queries(view, present, rotation, query, rows)
            stop = max(each.keys.stop for each in pieces)
            # The next step goes on with the keys as the last query meets them.
            is_last = rows.stop == query.shape[2]
            turned_key = _turn_keys(view, present, rotation, key, stop, slot if is_last else None)
        assert turned_query is not None
        assert turned_key is not None
        mask = None
        if piece.band:
            mask = _band_mask(piece.queries.stop - piece.queries.start, piece.band, query.device)
        part = attend_part(
            turned_query[:, :, piece.queries.start - rows.start : piece.queries.stop - rows.start],
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
    slot: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `attend_by_parts` for one query: its few logits are stored, for one softmax."""
    rows, heads, _, width = query.shape
    shape = (rows, key.shape[1], heads // key.shape[1], width)
    turned = _turn_step_queries(view, rotation, query)
    parts: list[torch.Tensor] = []
    spans: list[slice] = []  # keys of adjacent pieces are one span, whose values take one product
    for piece in sorted(view.pieces(), key=lambda piece: piece.keys.start):
        if spans and spans[-1].stop == piece.keys.start:
            spans[-1] = slice(spans[-1].start, piece.keys.stop)
        else:
            spans.append(piece.keys)
        keys = _turn_keys(view, piece.region, rotation, key, piece.keys.stop, slot)
        # Heads that share keys are rows of one product, which copies no keys.
        parts.append(turned[piece.region].view(shape) @ keys[:, :, piece.keys].transpose(-1, -2))
    scores = torch.cat(parts, dim=-1).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, *shape[1:3], 1).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    lengths = [span.stop - span.start for span in spans]
    shares = weights[..., : sum(lengths)].split(lengths, dim=-1)
    output = sum(share @ value[:, :, span] for share, span in zip(shares, spans, strict=True))
    return torch.as_tensor(output).view(rows, heads, 1, value.shape[-1]).to(query.dtype)


def _turn_step_queries(
    view: ForwardView, rotation: ShiftRotation, query: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Return the only query as each region turns it; our kernels take one launch for all."""
    regions = {piece.region for piece in view.pieces()}
    shifts = {region: view.regions[region].query_shift for region in regions}
    moving = tuple(sorted(region for region, shift in shifts.items() if shift is not None))
    widths = {shift.shape for shift in shifts.values() if shift is not None}
    if len(moving) < 2 or len(widths) > 1 or not rotation.uses_kernels(query):
        return {region: _turn_queries(view, region, rotation, query) for region in regions}
    tables = view.step_tables(moving, rotation, query)
    turned = zip(moving, rotation.turn_alike(query, tables), strict=True)
    return dict.fromkeys(regions, query) | dict(turned)


def _turn_queries(
    view: ForwardView,
    region: int,
    rotation: ShiftRotation,
    query: torch.Tensor,
    rows: slice = slice(None),
) -> torch.Tensor:
    """Return some queries, turned by a region."""
    tables = view.query_tables(region, rotation, query, rows)
    query = query[:, :, rows]
    return query if tables is None else rotation.turn(query, tables)


def _turn_keys(
    view: ForwardView,
    region: int,
    rotation: ShiftRotation,
    key: torch.Tensor,
    stop: int,
    slot: int | None,
) -> torch.Tensor:
    """Return the keys of a region, turned, of the slots before `stop` at least.

    With a record and a place in the cache they are kept, and the next call turns new keys alone.
    """
    facts = view.regions[region]
    if facts.key_shift is None:
        return key
    record = view.record
    if record is None or slot is None or facts.key_rule is None:
        slots = slice(0, stop)
        return rotation.turn(key[:, :, slots], view.key_tables(region, rotation, key, slots))
    kept = record.turned.get((slot, rotation))
    if kept is None or kept.rule != facts.key_rule or kept.buffer.dtype != key.dtype:
        kept = TurnedKeys(facts.key_rule, key.new_empty(*key.shape[:2], 0, key.shape[3]))
        record.turned[slot, rotation] = kept
    if kept.count < stop:
        new = slice(kept.count, min(stop + _AHEAD, key.shape[2]))
        tables = view.key_tables(region, rotation, key, new)
        if isinstance(tables, ShiftPositions):
            start = kept.count
            kept.extend(key[:, :, new])
            rotation.turn_(kept.buffer[:, :, start : kept.count], tables)
        else:
            kept.extend(rotation.turn(key[:, :, new], tables))
    return kept.buffer


@functools.lru_cache(maxsize=8)
def _band_mask(rows: int, band: int, device: torch.device) -> torch.Tensor:
    """Return where query n sees keys n to n + band - 1."""
    offset = (
        torch.arange(rows + band - 1, device=device) - torch.arange(rows, device=device)[:, None]
    )
    return (offset >= 0) & (offset < band)
