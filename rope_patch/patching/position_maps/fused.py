"""Compute attention at mapped positions in one launch, where a query sees one run of slots."""

from __future__ import annotations

import torch

from rope_patch.ops.attention import mapped_attention
from rope_patch.ops.attention_reference import AttentionRegions
from rope_patch.ops.modes import copy_to_device
from rope_patch.patching.position_maps.forward_view import ForwardView, Visibility
from rope_patch.patching.position_maps.shift_tables import ShiftRotation, count_shift


def attend_fused(
    view: ForwardView,
    rotation: ShiftRotation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
) -> torch.Tensor | None:
    """Return attention by the kernel of Triton, which stores neither logits nor turned keys.

    Args:
        view: The forward's positions.
        rotation: The layer's rotation.
        query: Rotated queries, `[B, H, Q, D]`.
        key: Rotated keys of all tokens, `[B, K, S, D]`.
        value: `[B, K, S, E]`.
        visibility: Which keys the queries see, with what else the attention function does.

    Returns:
        `[B, H, Q, E]`, 0 for padding; None where the kernel does not run, where the function does
        what the kernel does not (dropout, weights as a result), and under masks of another form.
    """
    call = visibility.call
    if call.dropout or call.returns_weights or not view.sees_runs(visibility):
        return None
    tables = view.remember(
        ("fused", id(rotation), query.device), lambda: _make_regions(view, rotation, query.device)
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
