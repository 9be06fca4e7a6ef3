"""Re-rotation of cached keys from one row of frequencies to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.ops import pack_frequencies, rerotate_
from rope_patch.ops.reference import rerotate_as_transformers_
from rope_patch.patching.architecture.rotary_traits import KeyLayout
from rope_patch.patching.kernels.attention_forward import use_exact_positions
from rope_patch.patching.start_tokens import preserve_start_keys

# (keys [B, K, S, D], the positions they were rotated at [B, S] or [B, S, A], layer type)
CachedKeys = tuple[torch.Tensor, torch.Tensor, str | None]


@dataclass(frozen=True)
class KeyRerotation:
    """Settings of a model's re-rotation.

    Attributes:
        slices: Where each layer type's numbers are in a row; see `FrequencyTable`.
        layout: How the keys are rotated.
        kernels: Which kernels take positions; None if none do.
        start_tokens: Positions below it keep their rotation; see `Method.start_token_count`.
    """

    slices: dict[str | None, tuple[int, int]]
    layout: KeyLayout
    kernels: str | None
    start_tokens: int

    def rerotate(
        self,
        cached: Iterable[CachedKeys],
        old: torch.Tensor,
        new: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        """Re-rotate the cached keys of the rows whose frequencies changed.

        Args:
            cached: The keys, which are re-rotated in place.
            old: Their frequencies, `[B, F]`.
            new: The new frequencies, `[B, F]`.
            changed: The rows to re-rotate, `[B]`.
        """
        rows = changed.nonzero().flatten().tolist()
        if not rows:
            return
        # In place, rows that follow one another change together: usually all of them.
        blocks = _runs(rows)
        # Layers of one type with the same slots re-rotate by the same angles.
        groups: dict[Any, list[CachedKeys]] = {}
        for keys, slots, layer_type in cached:
            with_gradients = torch.is_grad_enabled() and keys.requires_grad
            key = (layer_type, slots.shape[1], keys.device, with_gradients)
            groups.setdefault(key, []).append((keys, slots, layer_type))
        for (layer_type, _, _, with_gradients), layers in groups.items():
            start, end = self.slices[layer_type]
            at = layers[0][1].clamp(min=0)
            # Copies, because the cache's record changes later.
            applied_old = self.layout.applied(old[:, start:end])
            change = (blocks, at, applied_old, self.layout.applied(new[:, start:end]))
            keys_of_all = [keys for keys, _, _ in layers]
            if with_gradients:
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
            at: Positions, `[B, S]`, or `[B, S, A]` on several axes.
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
        """Re-rotate keys by exact angles or transformers' rounded ones, as they were rotated."""
        if self.kernels is not None and use_exact_positions(layers[0], self.kernels):
            rerotate_(
                layers,
                at.to(layers[0].device),
                *(pack_frequencies(s[:, :-1], s[:, -1]) for s in (old, new)),
                interleaved=self.layout.interleaved,
                kernels=self.kernels,
            )
            return
        scale = new[:, -1] / old[:, -1]
        sections = self.layout.sections
        rerotate_as_transformers_(
            layers,
            at if sections is None else at.movedim(-1, 0),
            old[:, :-1],
            new[:, :-1],
            scale,
            sections=sections,
            interleaved=self.layout.interleaved,
        )


def _runs(rows: list[int]) -> list[slice]:
    """Return sorted rows as slices of neighbours."""
    starts = [n for n in range(len(rows)) if n == 0 or rows[n] != rows[n - 1] + 1]
    ends = [*starts[1:], len(rows)]
    return [slice(rows[i], rows[j - 1] + 1) for i, j in zip(starts, ends, strict=True)]


class _DifferentiableRerotation(torch.autograd.Function):
    """`KeyRerotation.rerotate_blocks` with a backward pass."""

    @staticmethod
    def forward(
        rerotation: KeyRerotation, change: Any, *layers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rerotation.rerotate_blocks(layers, *change)
        return layers

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rerotation, ctx.change = inputs[:2]
        ctx.mark_dirty(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The transpose of a rotation rotates back by the same angle, with the same factor.
        blocks, at, old, new = ctx.change
        back = torch.cat([new[:, :-1], old[:, -1:]], 1), torch.cat([old[:, :-1], new[:, -1:]], 1)
        copies = [gradient.clone() for gradient in gradients]
        if torch.is_grad_enabled():
            copies = _DifferentiableRerotation.apply(ctx.rerotation, (blocks, at, *back), *copies)
        else:
            ctx.rerotation.rerotate_blocks(copies, blocks, at, *back)
        return None, None, *copies
