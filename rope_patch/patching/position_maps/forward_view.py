"""Tell the attentions of one forward its positions, its masks and the pieces to compute.

`ForwardView` has the positions of the new tokens and of those in the cache, `Visibility` reads one
layer's mask, and `PositionRecord` goes with the cache to the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from rope_patch.methods.position_map import PositionMap, Region
from rope_patch.patching.dynamic.cache_record import RotationRecord
from rope_patch.patching.position_maps.shift_tables import ShiftRotation
from rope_patch.transformers_api.attention_functions import AttentionCall
from rope_patch.utils.errors import Refused


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
        self._compared: tuple[Any, ...] | None = None
        self._runs: tuple[Any, ...] | None = None
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

    def sees_runs(self, visibility: Visibility) -> bool:
        """Return whether each query sees its own text up to itself, in adjacent slots, and no more.

        So it is in rows with padding, and in rows of several documents. Queries that are padding
        may see anything, because nothing reads their output.
        """
        if self.is_consecutive:
            return self.is_causal(visibility)
        facts = (visibility.call.mask, visibility.call.first_ahead)
        if visibility.call.documents is not None or facts[0] is None:
            return self._compare_runs(visibility)
        if self._runs is None or self._runs[0] is not facts[0] or self._runs[1] != facts[1]:
            self._runs = (*facts, self._compare_runs(visibility))
        return bool(self._runs[2])

    def _compare_runs(self, visibility: Visibility) -> bool:
        slots = torch.arange(self.keys.shape[1], device=self.keys.device)
        # A token's slot less its position is where its text begins. It changes between texts.
        begins = slots - self.keys
        changes = torch.ones_like(begins, dtype=torch.bool)
        changes[:, 1:] = (begins[:, 1:] != begins[:, :-1]) | (self.keys[:, 1:] < 0)
        run = torch.where(changes, slots, 0).cummax(-1).values
        own = self._query_slots()
        first = self.first_slots.clamp(min=0)
        is_token = self.queries >= 0
        is_apart = (run[:, own] > first) | (self.keys[:, own] != self.queries)
        if bool((is_token & is_apart).any()):
            return False
        for start in range(0, len(own), _COMPARED):
            span = slice(start, start + _COMPARED)
            seen, bias = visibility.of(slice(start, min(start + _COMPARED, len(own))))
            if seen is None or bias is not None:
                return False
            expected = (slots >= first[:, span, None]) & (slots <= own[span, None])
            is_equal = (seen == expected[:, None, None]) | ~is_token[:, None, None, span, None]
            if not bool(is_equal.all()):
                return False
        return True

    @property
    def first_slots(self) -> torch.Tensor:
        """Return the slot in which each query's text begins, `[B, Q]`; below 0 if before the first.

        Where texts lie in adjacent slots alone; see `sees_runs`.
        """
        return self._query_slots() - self.queries

    def _query_slots(self) -> torch.Tensor:
        steps = self.queries.shape[1]
        last = self.keys.shape[1] if self.is_consecutive else self.filled
        return torch.arange(last - steps, last, device=self.queries.device)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, made once for all layers of the forward."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

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
        shifts: Any = [self.regions[region].query_shift for region in regions]
        return self.remember(key, lambda: rotation.tables(torch.cat(shifts), query))

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
        return self.remember(key, lambda: rotation.tables(shift[:, slots], x))


def _are_consecutive(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Return whether all rows have the same positions, without gaps and padding."""
    slots, steps = keys.shape[1], queries.shape[1]
    if slots < steps or not slots:
        return False
    expected = keys[:1, :1] + torch.arange(slots, device=keys.device)
    is_same = (keys == expected).all() & (queries == expected[:, slots - steps :]).all()
    return bool(is_same & (keys[0, 0] >= 0))


_BAND_BLOCK = 256  # queries whose band of the mask is made at once


@dataclass(frozen=True)
class Piece:
    """Queries and keys of one fused call, as places in their tensors.

    Attributes:
        region: Place of the region in the map's list.
        queries: Where the queries are.
        keys: Where the keys are.
        is_causal: Whether query n of the piece sees its first n + 1 keys alone.
        band: Keys that each query sees, query n from its n-th on; 0 if it sees all.
    """

    region: int
    queries: slice
    keys: slice
    is_causal: bool = False
    band: int = 0


def cut_region(region: int, start: np.ndarray, stop: np.ndarray) -> Iterator[Piece]:
    """Yield the pieces of a region of consecutive queries, which fused attention takes as they are.

    A region gives each query an interval of keys. Over consecutive queries, its ends stay where
    they are or move on with the queries. So a region falls into rectangles, which need no mask,
    triangles, which are causal, and bands, which are computed in short blocks of queries under a
    small mask. Taken together they are the causal triangle: nothing is computed twice but the
    corners of the bands.

    Args:
        region: Place of the region in the map's list.
        start: First place of each query's keys, `[Q]`.
        stop: The place behind the last one; no key where it is not above `start`.
    """
    rows = np.flatnonzero(stop > start)
    if not len(rows):
        return
    steps = np.stack([np.diff(rows), np.diff(start[rows]), np.diff(stop[rows])])
    is_regular = (steps[0] == 1) & (steps[1:] >= 0).all(0) & (steps[1:] <= 1).all(0)
    first = 0
    while first < len(rows):
        last = first  # last row of a segment whose ends move alike
        while (
            last < len(rows) - 1
            and is_regular[last]
            and (steps[1:, last] == steps[1:, first]).all()
        ):
            last = _end_of_run(steps, is_regular, first, last)
        moves = (0, 0) if last == first else tuple(steps[1:, first])
        row = int(rows[first])
        yield from _cut_segment(
            region, row, last - first + 1, int(start[row]), int(stop[row]), moves
        )
        first = last + 1


def _end_of_run(steps: np.ndarray, is_regular: np.ndarray, first: int, last: int) -> int:
    """Return the last query of the run of equal steps that begins at `first`."""
    same = is_regular[last:] & (steps[1:, last:] == steps[1:, first][:, None]).all(0)
    broken = np.flatnonzero(~same)
    return last + (int(broken[0]) if len(broken) else len(same))


def _cut_segment(
    region: int, row: int, count: int, start: int, stop: int, moves: tuple[int, ...]
) -> Iterator[Piece]:
    """Yield the pieces of `count` queries from `row` on, whose first one sees start to stop."""
    queries = slice(row, row + count)
    if moves == (0, 0):
        yield Piece(region, queries, slice(start, stop))
    elif moves == (0, 1):
        if stop - 1 > start:
            yield Piece(region, queries, slice(start, stop - 1))
        yield Piece(region, queries, slice(stop - 1, stop - 1 + count), is_causal=True)
    elif moves == (1, 1):
        for first in range(0, count, _BAND_BLOCK):
            size = min(_BAND_BLOCK, count - first)
            keys = slice(start + first, stop + first + size - 1)
            rows = slice(row + first, row + first + size)
            band = stop - start if size > 1 else 0
            yield Piece(region, rows, keys, band=band)
    else:  # the first keys leave while the last stay
        for n in range(count):
            yield Piece(region, slice(row + n, row + n + 1), slice(start + n, stop))


_COMPARED = 256  # queries whose part of a mask is compared at once


class Visibility:
    """The mask of one call of an attention function, its causality and its documents.

    Attributes:
        call: What the function does.
    """

    def __init__(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> None:
        self.call = call
        self.rows, self.heads, self.steps = query.shape[:3]
        self.kv_heads, self.slots = key.shape[1:3]
        self.device = query.device
        self._mask = self._checked_mask()

    def of(self, span: slice) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return where some queries see keys, and what is added to their logits; None for nothing.

        Args:
            span: The queries.

        Returns:
            Two tensors that broadcast to `[B, K, G, q, S]`, or None.
        """
        seen = bias = None
        call, mask = self.call, self._mask
        if call.first_ahead is not None:
            last = torch.arange(self.steps, device=self.device)[span, None] + call.first_ahead
            seen = (torch.arange(self.slots, device=self.device) < last)[None, None, None]
        if call.documents is not None:
            number = call.documents.to(self.device)
            seen = _both(seen, (number[:, span, None] == number[:, None])[:, None, None])
        if mask is None:
            return seen, bias
        if isinstance(mask, torch.Tensor) and call.hides_keys:
            return _both(seen, mask[:, None, None, None]), bias
        part = self._part(mask, span)
        if part.shape[1] == 1:
            part = part[:, :, None]
        else:
            part = part.unflatten(1, (self.kv_heads, self.heads // self.kv_heads))
        if part.dtype == torch.bool and not self._adds:
            seen = _both(seen, part)
        else:
            bias = part
        return seen, bias

    def is_causal(self) -> bool:
        """Return whether query n of Q sees the first S - Q + n + 1 keys, all of them and no others.

        A mask of booleans is compared with this; one that is added counts as another.
        """
        call, ahead = self.call, self.slots - self.steps + 1
        if call.documents is not None:
            return False
        if self._mask is None:
            return call.first_ahead == ahead or (call.first_ahead is None and self.steps == 1)
        if call.hides_keys:
            return call.first_ahead == ahead and bool(self._mask.all())
        if self._adds or self._mask.shape[1] > 1:
            return False
        for first in range(0, self.steps, _COMPARED):
            span = slice(first, min(first + _COMPARED, self.steps))
            last = torch.arange(self.steps, device=self.device)[span, None] + ahead
            expected = torch.arange(self.slots, device=self.device) < last
            seen, bias = self.of(span)
            if seen is None or bias is not None or not bool((seen == expected).all()):
                return False
        return True

    @property
    def _adds(self) -> bool:
        return self.call.adds_mask and isinstance(self._mask, torch.Tensor)

    def _part(self, mask: Any, span: slice) -> torch.Tensor:
        """Return a mask's part for some queries, `[B, H, q, S]`, each size or 1."""
        if isinstance(mask, torch.Tensor):
            return mask[:, :, span if mask.shape[2] > 1 else slice(None)]
        from torch.nn.attention.flex_attention import create_mask

        def shifted(row: Any, head: Any, step: Any, slot: Any) -> Any:
            return mask.mask_mod(row, head, step + span.start, slot)

        rows, heads = mask.shape[:2]
        steps = span.stop - span.start
        return create_mask(shifted, rows, heads, steps, self.slots, str(self.device))

    def _checked_mask(self) -> Any:
        """Return the mask: `[B, S]` for flash attention, flex attention's blocks, else 4-D."""
        mask = self.call.mask
        if mask is None or (hasattr(mask, "mask_mod") and self.call.adds_mask):
            return mask
        if isinstance(mask, torch.Tensor) and self.call.hides_keys:
            if mask.ndim == 2 and len(mask) == self.rows:
                # That of a static cache may end ahead of the keys, or behind them.
                is_token = mask[:, -self.slots :].bool().to(self.device)
                return nn.functional.pad(is_token, (0, self.slots - is_token.shape[1]))
        elif isinstance(mask, torch.Tensor) and mask.ndim <= 4:
            mask = mask[(None,) * (4 - mask.ndim)].to(self.device)[..., : self.slots]
            wanted = (self.rows, self.heads, self.steps, self.slots)
            is_number = mask.dtype == torch.bool or mask.is_floating_point()
            fits = all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))
            if fits and (is_number or self.call.adds_mask):
                return mask
        got = f"{type(mask).__name__} of shape {list(getattr(mask, 'shape', ()))}"
        raise Refused(
            f"expected a mask of {self.rows} rows, {self.steps} queries and {self.slots} keys, "
            f"for at most {self.heads} heads, got a {got}: a position map does not know which keys "
            "it shows"
        )


def _both(seen: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if seen is None else seen & other


_GROWTH = 1.25  # a full buffer's next size over the size that is needed


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
