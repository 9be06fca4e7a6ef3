"""What the attentions of one forward need to know of its positions."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.methods.position_map import PositionMap, Region
from rope_patch.patching.position_maps.pieces import Piece, cut_region
from rope_patch.patching.position_maps.position_record import PositionRecord
from rope_patch.patching.position_maps.shift_tables import ShiftRotation
from rope_patch.patching.position_maps.visibility import Visibility


class ForwardView:
    """Positions, regions and rotation tables of one forward of a decoder, shared by its layers.

    Attributes:
        queries: Positions of the new tokens, -1 for padding, `[B, Q]`, or `[1, Q]` where all rows
            are alike.
        keys: Positions of all tokens, the cached ones included, `[B, K]` or `[1, K]`.
        is_mapped: Whether any query meets a key at another distance than its own.
        is_consecutive: Whether all rows have the same consecutive positions.
        filled: Slots of the keys that hold tokens.
        cache: The cache, if there is one.
        record: Its record.
        regions: The map's regions; for `[1, Q]` queries on the CPU where positions are
            consecutive.
    """

    def __init__(
        self,
        position_map: PositionMap,
        reach: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        *,
        filled: int,
        cache: Any = None,
        record: PositionRecord | None = None,
    ) -> None:
        self.filled, self.cache, self.record = filled, cache, record
        self.queries, self.keys = queries, keys
        last = int(queries.max()) if queries.numel() else -1
        self.is_mapped = last >= position_map.map_start(reach)
        self.regions: list[Region] = []
        self.is_consecutive = False
        self._compared: tuple[Any, int | None, bool] | None = None
        self._pieces: list[Piece] | None = None
        self._tables: dict[Any, Any] = {}
        if not self.is_mapped:
            return
        self.is_consecutive = _are_consecutive(queries, keys)
        if self.is_consecutive:
            self.queries, self.keys = queries[:1].cpu(), keys[:1].cpu()
        self.regions = position_map.regions(self.queries, self.keys, reach, last)

    def is_causal(self, visibility: Visibility) -> bool:
        """Return whether all rows are consecutive, and each query sees all keys up to its own."""
        if not self.is_consecutive:
            return False
        mask, ahead = visibility.call.mask, visibility.call.first_ahead
        if mask is None:
            return visibility.is_causal()
        # Layers share a mask. Beside that of flash attention, each has a causality of its own.
        if self._compared is None or self._compared[0] is not mask or self._compared[1] != ahead:
            self._compared = (mask, ahead, visibility.is_causal())
        return self._compared[2]

    def slot_of(self, key: torch.Tensor) -> int | None:
        """Return the place in the cache that holds these keys; None where none holds just them.

        A module's `layer_idx` is no such place: modules share one (Zamba 2), and one module fills
        several places (HRM). What a quantised cache hands out is in none.
        """
        for slot, layer in enumerate(getattr(self.cache, "layers", ())):
            if getattr(layer, "keys", None) is key:
                return slot
        return None

    def pieces(self) -> list[Piece]:
        """Return the fused calls of consecutive positions."""
        if self._pieces is None:
            first = int(self.keys[0, 0])
            self._pieces = [
                piece
                for index, region in enumerate(self.regions)
                for piece in cut_region(
                    index,
                    (region.start[0] - first).clamp(min=0).numpy(),
                    (region.stop[0] - first).clamp(max=self.keys.shape[1]).numpy(),
                )
            ]
        return self._pieces

    def query_tables(
        self,
        region: int,
        rotation: ShiftRotation,
        query: torch.Tensor,
        slots: slice = slice(None),
    ) -> Any:
        """Return the tables that turn queries of a region; None where they stay."""
        shift = self.regions[region].query_shift
        return self._tables_of(("query", region), shift, rotation, query, slots)

    def key_tables(
        self, region: int, rotation: ShiftRotation, key: torch.Tensor, slots: slice = slice(None)
    ) -> Any:
        """Return the tables that turn keys of a region; None where they stay."""
        shift = self.regions[region].key_shift
        return self._tables_of(("key", region), shift, rotation, key, slots)

    def step_tables(
        self, regions: tuple[int, ...], rotation: ShiftRotation, query: torch.Tensor
    ) -> Any:
        """Return the tables that turn the only query by several regions, one a row."""
        key = ("step", regions, id(rotation), query.device, query.dtype)
        if key not in self._tables:
            shifts: Any = [self.regions[region].query_shift for region in regions]
            self._tables[key] = rotation.tables(torch.cat(shifts), query)
        return self._tables[key]

    def _tables_of(
        self,
        name: Any,
        shift: torch.Tensor | None,
        rotation: ShiftRotation,
        x: torch.Tensor,
        slots: slice,
    ) -> Any:
        if shift is None:
            return None
        key = (name, slots.start, slots.stop, id(rotation), x.device, x.dtype)
        if key not in self._tables:
            self._tables[key] = rotation.tables(shift[:, slots], x)
        return self._tables[key]


def _are_consecutive(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Return whether all rows have the same positions, without gaps and padding."""
    slots, steps = keys.shape[1], queries.shape[1]
    if slots < steps or not slots:
        return False
    expected = keys[:1, :1] + torch.arange(slots, device=keys.device)
    is_same = (keys == expected).all() & (queries == expected[:, slots - steps :]).all()
    return bool(is_same & (keys[0, 0] >= 0))
