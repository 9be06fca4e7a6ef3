"""Compute attention at mapped positions: in one launch, by a call a piece, or with all logits.

`attend` chooses: our kernel, where it runs and each query sees one run of slots; else, for causal
attention over consecutive positions, torch's kernels, whose parts are merged (`attend_by_parts`);
else `attend_masked`, which serves any mask.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from rope_patch.ops.modes import copy_to_device
from rope_patch.patching.position_maps.forward_view import ForwardView, TurnedKeys, Visibility
from rope_patch.patching.position_maps.shift_tables import (
    ShiftPositions,
    ShiftRotation,
    count_shift,
)

if TYPE_CHECKING:
    from rope_patch.ops.attention_reference import AttentionRegions

_AHEAD = 64  # keys that are rotated for far queries in advance, so that few steps rotate any


def attend(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention by the fastest way that does all that the function does.

    Args:
        view: The forward's positions.
        rotation: The layer's rotation.
        query: Rotated queries, `[B, H, Q, D]`.
        key: Rotated keys of all tokens, `[B, K, S, D]`.
        value: `[B, K, S, E]`.
        visibility: Which keys the queries see, with what else the attention function does.

    Returns:
        See `attend_masked`.
    """
    if rotation.uses_kernels(query):
        output = _attend_in_one_launch(view, rotation, query, key, value, visibility)
        if output is not None:
            return output, None
    call = visibility.call
    has_plain_logits = call.softcap is None and call.dropout == 0 and not call.returns_weights
    needs_gradients = torch.is_grad_enabled() and any(
        each.requires_grad for each in (query, key, value)
    )
    if has_plain_logits and not needs_gradients and view.is_causal(visibility):
        sinks = call.sinks
        return attend_by_parts(view, rotation, query, key, value, call.scaling, sinks=sinks), None
    return attend_masked(view, rotation, query, key, value, visibility)


def _attend_in_one_launch(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
) -> torch.Tensor | None:
    """Return attention in one launch; None where the kernel does not do what the function does."""
    # It takes padding, which gets 0, several documents in a row, gradients, soft caps and sinks;
    # neither dropout nor weights as a result, nor masks of another form. Imported here, because
    # most patches never need it.
    from rope_patch.ops.attention import mapped_attention

    call = visibility.call
    if call.dropout or call.returns_weights or not view.sees_runs(visibility):
        return None
    tables = view.remember(
        ("regions", id(rotation), query.device), lambda: _make_regions(view, rotation, query.device)
    )
    return mapped_attention(
        query,
        key,
        value,
        tables,
        scaling=call.scaling,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks.to(query.device),
        interleaved=rotation.interleaved,
        kernels=rotation.kernels,
    )


def _make_regions(
    view: ForwardView, rotation: ShiftRotation, device: torch.device
) -> AttentionRegions:
    """Return a forward's regions as intervals of slots, on a device."""
    from rope_patch.ops.attention_reference import AttentionRegions

    starts, stops = (
        torch.stack(
            [(x + view.first_slots).clamp(min=0, max=view.keys.shape[1]) for x in ends], dim=1
        ).int()
        for ends in zip(*((each.start, each.stop) for each in view.regions), strict=True)
    )
    stops = torch.where(view.queries[:, None] < 0, 0, stops)
    # Groups that grow with the text bring regions that no query of a step has.
    shown = (stops > starts).any(-1).any(0).nonzero().flatten().tolist()
    regions = [view.regions[n] for n in shown]
    shifts = [x for each in regions for x in (each.query_shift, each.key_shift) if x is not None]
    bits, parts = count_shift(*shifts), max((x.shape[2:].numel() for x in shifts), default=1)

    def stack(given: list[torch.Tensor | None], tokens: torch.Tensor) -> torch.Tensor:
        still = tokens.new_zeros(*tokens.shape, 1)
        units = [
            still if x is None else (x * 2**bits).round().long().view(*tokens.shape, -1)
            for x in given
        ]
        return torch.stack([x.expand(*tokens.shape, parts) for x in units], 1)

    turns = [int(each.key_shift is not None) for each in regions]
    tables = AttentionRegions(
        starts[:, shown],
        stops[:, shown],
        stack([each.query_shift for each in regions], view.queries),
        stack([each.key_shift for each in regions], view.keys),
        torch.tensor(turns, dtype=torch.int32),
        rotation.packed_freqs(bits, device),
    )
    return AttentionRegions(
        **{
            name: copy_to_device(x, device) if x.device.type == "cpu" else x.to(device)
            for name, x in vars(tables).items()
        }
    )


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
    """Return the keys of a region, turned, of the slots before `stop` at least."""
    facts = view.regions[region]
    if facts.key_shift is None:
        return key
    record = view.record
    if record is None or slot is None or facts.key_rule is None:
        slots = slice(0, stop)
        return rotation.turn(key[:, :, slots], view.key_tables(region, rotation, key, slots))
    # With a record and a place in the cache, turned keys are kept: the next call turns new keys
    # alone.
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


_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax attention and the log-sum-exp of its logits. Every query must see some key.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, K, S, D]`; H is a multiple of K.
        value: `[B, K, S, E]`.
        scaling: Factor of the logits.
        is_causal: Whether query n sees the first n + 1 keys alone; only for Q = S.
        mask: `[Q, S]`, True where a query sees a key.

    Returns:
        Output `[B, H, Q, E]` in the query's dtype, and log-sum-exp `[B, H, Q]` in float32, or
        float64 for float64.
    """
    # The operators behind torch's public function check nothing; they read other memory where
    # components are not neighbours.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if query.shape[2] > 1 and _fits_cpu_operator(query, key, value):
        return _on_cpu(query, key, value, scaling, is_causal, mask)
    part = None
    if query.is_cuda:
        part = _on_cuda(query, key, value, scaling, is_causal, mask)
    if part is None:
        part = attend_in_torch(query, key, value, scaling, is_causal=is_causal, mask=mask)
    return part


def attend_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend_part` in plain torch; stores all logits."""
    rows, heads, steps, width = query.shape
    groups = heads // key.shape[1]
    # Heads that share keys are rows of one product, which copies no keys.
    folded = query.reshape(rows, key.shape[1], groups * steps, width)
    scores = torch.matmul(folded, key.transpose(-1, -2)) * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if is_causal:
        mask = torch.ones(steps, key.shape[2], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat(groups, 1), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    output = torch.matmul(weights, value).view(rows, heads, steps, value.shape[-1])
    return output, lse.view(rows, heads, steps)


def _fits_cpu_operator(*tensors: torch.Tensor) -> bool:
    """Return whether torch's operator for CPUs takes queries, keys and values as they are."""
    # These are the conditions under which `scaled_dot_product_attention` chooses it.
    first = tensors[0]
    return first.dtype in _CPU_DTYPES and all(
        each.device.type == "cpu"
        and each.layout == torch.strided
        and not each.is_nested
        and each.ndim == 4
        and each.dtype == first.dtype
        and each.shape[0] == first.shape[0]
        and each.shape[-1] == first.shape[-1]
        and each.stride(-1) == 1
        and each.numel() > 0
        for each in tensors
    )


def _on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    is_causal, mask = how
    if (groups := query.shape[1] // key.shape[1]) > 1 and not _shares_keys_on_cpu():
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = None if mask is None else _as_bias(mask, query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scaling
    )


@functools.cache
def _shares_keys_on_cpu() -> bool:
    """Return whether torch's operator for CPUs lets several heads share keys."""
    # The operator of torch 2.6 reads behind the keys instead, without an error. The keys of this
    # trial lie in front of others, so that it reads its own memory.
    values = torch.arange(4.0).view(1, 4, 1, 1).repeat(1, 1, 1, 16)
    shared = values[:, :2]
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(values, shared, shared)
    return output[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def _on_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *how: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a part from a fused kernel; None where torch's own checks let none take it."""
    is_causal, mask = how
    groups = query.shape[1] // key.shape[1]
    is_padded = query.shape[-1] % 8  # the public function pads, but after these checks
    if (
        mask is None
        and not is_padded
        and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, is_causal, groups > 1))
    ):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scaling
        )
        return output, lse
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = None
    if mask is not None:
        # The kernel wants rows that begin at multiples of 16 bytes.
        width = mask.shape[1]
        padded = torch.zeros(
            mask.shape[0], -(-width // 16) * 16, dtype=query.dtype, device=query.device
        )
        padded[:, :width].masked_fill_(~mask, -torch.inf)
        bias = padded[:, :width].expand(*query.shape[:2], -1, -1)
    if not can_use_efficient_attention(SDPAParams(query, key, value, bias, 0.0, is_causal, False)):
        return None
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scaling
    )
    return output, lse[..., : query.shape[2]]  # the kernel pads the queries


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -torch.inf)[None, None]


class MergedParts:
    """Attention merged from parts of the keys, in place.

    Attributes:
        output: `[B, H, Q, E]`, float32 or wider.
        lse: Log-sum-exp of the logits so far, `[B, H, Q]`; -inf for queries without keys.
    """

    def __init__(self, query: torch.Tensor, value: torch.Tensor) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = query.shape[:3]
        self.output = torch.zeros(*shape, value.shape[-1], dtype=wide, device=query.device)
        self.lse = torch.full(shape, -torch.inf, dtype=wide, device=query.device)

    def add(self, rows: slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the attention of some queries over further keys."""
        old = self.lse[:, :, rows]
        lse = lse.to(old.dtype)
        new = torch.logaddexp(old, lse)
        target = self.output[:, :, rows]
        target.mul_(torch.exp(old - new)[..., None])
        target.addcmul_(output.to(target.dtype), torch.exp(lse - new)[..., None])
        old.copy_(new)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Merge a logit for each head that no value goes with (attention sinks), `[H]`."""
        sinks = sinks.to(self.lse.dtype).view(1, -1, 1)
        self.output.mul_(torch.sigmoid(self.lse - sinks)[..., None])


_LOGITS = 2**24  # logits that a block of queries has at most


def attend_masked(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention under any mask, with all logits of a block of queries at once.

    It serves padding, gradients, softcap and dropout, too, and is what the fused parts are tested
    against. Memory grows linearly with the keys, but for gradients.

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
