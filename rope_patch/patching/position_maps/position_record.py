"""Record of the positions of the tokens in a cache, with copies of keys that were turned."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from rope_patch.patching.dynamic.cache_record import RotationRecord
from rope_patch.patching.position_maps.shift_tables import ShiftRotation

_GROWTH = 1.25  # of a buffer that is full


@dataclass
class TurnedKeys:
    """A layer's first keys, turned by one rule.

    Attributes:
        rule: `Region.key_rule`.
        buffer: `[B, K, C, D]`, C the capacity.
        count: How many slots are filled.
    """

    rule: Hashable
    buffer: torch.Tensor
    count: int = 0

    def extend(self, turned: torch.Tensor) -> None:
        """Add the keys that follow, `[B, K, S, D]`."""
        end = self.count + turned.shape[2]
        if end > self.buffer.shape[2]:
            rows, heads, _, width = self.buffer.shape
            with torch.inference_mode(False):  # later forwards may write outside it
                larger = self.buffer.new_empty(rows, heads, int(end * _GROWTH) + 64, width)
            larger[:, :, : self.count] = self.buffer[:, :, : self.count]
            self.buffer = larger
        self.buffer[:, :, self.count : end] = turned
        self.count = end


@dataclass
class PositionRecord(RotationRecord):
    """The positions of a cache's tokens; see `RotationRecord`, whose frequencies are empty here.

    Attributes:
        turned: Turned copies of keys, by their place in the cache and the rotation; they are made
            anew when rows are reordered, and are not part of copies of the cache.
    """

    turned: dict[tuple[int, ShiftRotation], TurnedKeys] = field(default_factory=dict)

    def rearrange(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> PositionRecord:
        moved = super().rearrange(rows)
        return PositionRecord(**{**vars(moved), "turned": {}})

    def crop_turned(self, past: int) -> None:
        """Forget turned keys behind the first `past` tokens, which the cache no longer holds."""
        for keys in self.turned.values():
            keys.count = min(keys.count, past)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "turned": {}}
