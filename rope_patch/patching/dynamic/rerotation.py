"""Cached keys turned on from one set of frequencies to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.ops import pack_frequencies, rerotate_
from rope_patch.ops.reference import rerotate_as_transformers_
from rope_patch.patching.kernels.position_passthrough import use_exact_positions
from rope_patch.patching.start_tokens import preserve_start_keys

# (keys [B, K, S, D], where they were rotated at [B, S], layer type)
CachedKeys = tuple[torch.Tensor, torch.Tensor, str | None]


@dataclass(frozen=True)
class KeyRerotation:
    """How a model's keys are turned.

    Attributes:
        slices: Where each layer type's numbers are in a set; see `Sets`.
        interleaved: See `rope_patch.ops.rope`.
        kernels: By whom positions are rotated to, where they are; else None.
        start_tokens: Positions below it keep their rotation; see `Method.start_token_count`.
    """

    slices: dict[str | None, tuple[int, int]]
    interleaved: bool
    kernels: str | None
    start_tokens: int

    def rerotate(
        self,
        cached: Iterable[CachedKeys],
        sets: torch.Tensor,
        wanted: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        """Turns the cached keys of the rows that changed from one set on to the other.

        Args:
            cached: The keys, which are changed in place.
            sets: What they were rotated by, `[B, F]`.
            wanted: What they are to be rotated by, `[B, F]`.
            changed: Which rows, `[B]`.
        """
        rows = changed.nonzero().flatten().tolist()
        if not rows:
            return
        # As one block where all rows change, which is the rule; else row by row, in place.
        blocks = [slice(None)] if len(rows) == len(changed) else [slice(r, r + 1) for r in rows]
        # Layers of one type that hold the same slots turn by the same angles.
        together: dict[Any, list[CachedKeys]] = {}
        for keys, slots, kind in cached:
            graded = torch.is_grad_enabled() and keys.requires_grad
            key = (kind, slots.shape[1], keys.device, graded)
            together.setdefault(key, []).append((keys, slots, kind))
        for (kind, _, _, graded), layers in together.items():
            start, end = self.slices[kind]
            at = layers[0][1].clamp(min=0)
            # A copy, since the record of the cache is changed later on.
            change = (blocks, at, sets[:, start:end].clone(), wanted[:, start:end])
            keys_of_all = [keys for keys, _, _ in layers]
            if graded:
                _DifferentiableRerotation.apply(self, change, *keys_of_all)
            else:
                self.rerotate_blocks(keys_of_all, *change)

    def rerotate_blocks(
        self,
        layers: Sequence[torch.Tensor],
        blocks: list[slice],
        at: torch.Tensor,
        old: torch.Tensor,
        new: torch.Tensor,
    ) -> None:
        """Re-rotate the keys of layers of one type in place.

        Args:
            layers: Keys, `[B, K, S, D]` each.
            blocks: The rows that change.
            at: Positions, `[B, S]`.
            old: Frequencies and attention factor that they are rotated by, `[B, R / 2 + 1]`.
            new: Those to rotate them by.
        """
        for block in blocks:
            rows = [keys[block] for keys in layers]
            with preserve_start_keys(rows, at[block], self.start_tokens):
                self._rerotate_block(rows, at[block], old[block], new[block])

    def _rerotate_block(
        self, layers: list[torch.Tensor], at: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Turns keys on by the angles that they were rotated by: exact ones, or transformers'."""
        device = layers[0].device
        if self.kernels is not None and use_exact_positions(layers[0], self.kernels):
            turns = [pack_frequencies(s[:, :-1], s[:, -1]).to(device) for s in (old, new)]
            rerotate_(
                layers,
                at.to(device),
                *turns,
                interleaved=self.interleaved,
                kernels=self.kernels,
            )
            return
        scale = new[:, -1] / old[:, -1]
        rerotate_as_transformers_(
            layers, at, old[:, :-1], new[:, :-1], scale, interleaved=self.interleaved
        )


class _DifferentiableRerotation(torch.autograd.Function):
    """`KeyRerotation.rerotate_blocks`, through which gradients flow."""

    @staticmethod
    def forward(
        turning: KeyRerotation, change: Any, *layers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        turning.rerotate_blocks(layers, *change)
        return layers

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.turning, ctx.change = inputs[:2]
        ctx.mark_dirty(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A rotation's transpose turns back by the same angle, with the same factor.
        blocks, at, old, new = ctx.change
        back = torch.cat([new[:, :-1], old[:, -1:]], 1), torch.cat([old[:, :-1], new[:, -1:]], 1)
        copies = [gradient.clone() for gradient in gradients]
        if torch.is_grad_enabled():
            copies = _DifferentiableRerotation.apply(ctx.turning, (blocks, at, *back), *copies)
        else:
            ctx.turning.change(copies, blocks, at, *back)
        return None, None, *copies
