"""Cached keys turned on from one set of frequencies to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.ops import make_turns, rerotate_
from rope_patch.ops.reference import rerotate_as_transformers_
from rope_patch.patching.handing import hands_over
from rope_patch.patching.starting import left_alone

# (keys [B, K, S, D], where they were rotated at [B, S], layer type)
Cached = tuple[torch.Tensor, torch.Tensor, str | None]


@dataclass(frozen=True)
class Turning:
    """How a model's keys are turned.

    Attributes:
        parts: Where each layer type's numbers are in a set; see `Sets`.
        interleaved: See `rope_patch.ops.rope`.
        kernels: By whom positions are rotated to, where they are; else None.
        kept_tokens: Positions below it keep their rotation; see `Method.kept_tokens`.
    """

    parts: dict[str | None, tuple[int, int]]
    interleaved: bool
    kernels: str | None
    kept_tokens: int

    def turn(
        self,
        cached: Iterable[Cached],
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
        together: dict[Any, list[Cached]] = {}
        for keys, slots, kind in cached:
            together.setdefault((kind, slots.shape[1], keys.device), []).append((keys, slots, kind))
        for layers in together.values():
            _, slots, kind = layers[0]
            start, end = self.parts[kind]
            for block in blocks:
                keys_of_all = [keys[block] for keys, _, _ in layers]
                at = slots[block].clamp(min=0)
                with left_alone(keys_of_all, at, self.kept_tokens):
                    self._turn_on(keys_of_all, at, sets[block, start:end], wanted[block, start:end])

    def _turn_on(
        self, layers: list[torch.Tensor], at: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Turns keys on by the angles that they were rotated by: exact ones, or transformers'."""
        device = layers[0].device
        if self.kernels is not None and hands_over(layers[0], self.kernels):
            turns = [make_turns(s[:, :-1], s[:, -1]).to(device) for s in (old, new)]
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
