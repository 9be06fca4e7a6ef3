"""Record of how the keys in a cache are rotated, carried by the cache.

Under a length-dependent method, a cache carries a record of the positions and the frequencies of
its keys. The record is reordered, repeated, selected, copied and pickled with the cache. Under a
static method a digest of the frequencies takes its place (see `rope_patch.patching.stamp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.transformers_api.caches import (
    INDEXED_LAYERS,
    REROTATABLE_LAYERS,
    Cache,
    CacheLayerMixin,
    StaticLayer,
    layer_classes,
)
from rope_patch.utils.errors import Refused

UNKNOWN = torch.nan


@dataclass
class RotationRecord:
    """How the keys of a cache are rotated. B rows, S slots.

    Spans and frequencies lie on the CPU, so a decode step without a change waits for no device.

    Attributes:
        patch_id: The patch that wrote `row_spans`; another patch computes them from `positions`.
        positions: Position of each slot's key, -1 for slots without a token, `[B, S]`; `[B, S, A]`
            where it has one on each of A axes (M-RoPE).
        row_spans: First position of each row, the largest that the last one can be, and the length
            that its frequencies serve (see `Method.valid_until`); `[B, 3]`, float64, on the CPU;
            NaN where unknown.
        frequencies: The frequencies of each row's keys, one layer type's after another's, `[B, F]`,
            float64, on the CPU; NaN where there are none yet.
        static: Whether `positions` has a slot for all that the cache can hold at once. It grows
            only where windows have let tokens go, so that more come than there are slots.
        layout: What patches must have in common to re-rotate each other's keys: where each layer
            type's numbers are in a set, and how many first positions keep their rotation.
    """

    patch_id: str
    positions: torch.Tensor
    row_spans: torch.Tensor
    frequencies: torch.Tensor
    static: bool
    layout: tuple[Any, ...]

    @classmethod
    def empty(
        cls, patch_id: str, positions: torch.Tensor, row_width: int, layout: tuple[Any, ...]
    ) -> RotationRecord:
        """Return a record of rows whose spans and frequencies are unknown yet.

        Args:
            patch_id: See above.
            positions: See above.
            row_width: F, the count of numbers in a row's frequencies.
            layout: See above.
        """
        rows = positions.shape[0]
        with torch.inference_mode(False):  # later forwards may run outside it
            bounds = torch.full((rows, 3), UNKNOWN, dtype=torch.float64, device="cpu")
            sets = torch.full((rows, row_width), UNKNOWN, dtype=torch.float64, device="cpu")
        return cls(patch_id, positions, bounds, sets, positions.shape[1] > 0, layout)

    def rearrange(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> RotationRecord:
        """Return the record of a cache whose rows went through `rows`, a function of `[B, ...]`."""
        moved = (rows(self.positions), rows(self.row_spans), rows(self.frequencies))
        return RotationRecord(self.patch_id, *moved, self.static, self.layout)

    def forget_spans(self) -> None:
        """Have the rows' first and last positions read again, because tokens left the cache."""
        self.row_spans = self.row_spans.clone()
        self.row_spans[:, :2] = UNKNOWN

    def append(self, past: Any, new: torch.Tensor) -> None:
        """Record the positions of new tokens.

        Args:
            past: How many slots are filled, an int or, in static caches, a tensor.
            new: Their positions, `[B, S]` or `[B, S, A]`.
        """
        if not self.static:
            self.positions = torch.cat([self.positions, new], dim=1)
            return
        if isinstance(past, int) and (more := past + new.shape[1] - self.positions.shape[1]) > 0:
            with torch.inference_mode(False):  # later forwards may run outside it
                empty = self.positions.new_full((len(new), more, *new.shape[2:]), -1)
                self.positions = torch.cat([self.positions, empty], dim=1)
        slot = torch.arange(self.positions.shape[1], device=new.device)
        slot = slot.view(-1, *[1] * (new.ndim - 2))
        self.positions.masked_fill_(slot >= past, -1)  # left by a failed forward
        at = torch.arange(new.shape[1], device=new.device) + past
        self.positions.index_copy_(1, at, new.to(self.positions.dtype))


class CacheWithRecord(Cache):
    """Mixin for a cache that carries a record through every change of its rows."""

    rotation: RotationRecord | str | None = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._rearrange_record(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rearrange_record(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._rearrange_record(lambda rows: rows[indices.to(rows.device)])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if isinstance(self.rotation, RotationRecord):
            self.rotation.forget_spans()  # rows may be shorter now than their frequencies serve

    def reset(self) -> None:
        super().reset()
        self.rotation = None

    def _rearrange_record(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if isinstance(self.rotation, RotationRecord):
            self.rotation = self.rotation.rearrange(rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created at run time, so copies and pickles name its base class.
        return _unpickle, type(self).__bases__[1:], self.__dict__


_RECORD_CLASSES: dict[type, type] = {}


def attach_record(cache: Any, record: RotationRecord) -> None:
    """Attach a record to a cache, which from then on follows every change of the cache's rows."""
    if not isinstance(cache, CacheWithRecord) and not torch.compiler.is_compiling():
        # A compiled graph cannot change an object's class; the next eager call does.
        cache.__class__ = _record_class_of(type(cache))
    cache.rotation = record


def get_record(
    cache: Any, past: Any, batch: int, layout: tuple[Any, ...], patch_id: str
) -> RotationRecord | None:
    """Return a cache's record, cropped to what the cache holds now; None for an empty cache.

    Args:
        cache: Any of transformers' caches, or None.
        past: How many slots are filled.
        batch: Rows that are about to be added to it.
        layout: The current patch's layout; see `RotationRecord`.
        patch_id: The current patch's id.

    Raises:
        ValueError: It is unknown how the cache's keys are rotated. The cache is as it was.
    """
    record = getattr(cache, "rotation", None)
    if not isinstance(record, RotationRecord):
        if not torch.compiler.is_compiling() and int(past) > 0:
            raise Refused(
                f"the cache holds {int(past)} tokens, and no record of how their keys were "
                "rotated: it was filled before the model was patched, under a method whose "
                "frequencies stay, or rebuilt from its tensors. "
                "Expected an empty cache, or one that this patched model filled; copy caches with "
                "copy.deepcopy, which keeps the record"
            )
        return None
    if record.layout != layout:
        raise Refused(
            "the cache was filled under a patch of other layer types, start tokens or frequencies: "
            "expected an empty cache, or one that was filled under this patch"
        )
    rows, slots = record.positions.shape[:2]
    if rows != batch or (isinstance(past, int) and slots < past):
        raise Refused(
            f"the cache is not as this model left it: expected {rows} rows of {slots} tokens, got "
            f"{batch} rows of {past}; change caches by their own methods (reorder_cache, "
            "batch_select_indices, crop)"
        )
    if not record.static and slots > past:
        if past == 0:
            return None  # nothing is left to re-rotate
        record.positions = record.positions[:, :past]
        record.forget_spans()
    if record.patch_id != patch_id:
        record.patch_id = patch_id
        record.row_spans = torch.full_like(record.row_spans, UNKNOWN)
    return record


def cached_positions(cache: Any) -> torch.Tensor | None:
    """Return the positions of the tokens in a cache, `[B, S]`; None without a record of them."""
    record = getattr(cache, "rotation", None)
    if not isinstance(record, RotationRecord):
        return None
    return record.positions[:, : int(cache.get_seq_length())]


def empty_positions(cache: Any, new: torch.Tensor) -> torch.Tensor:
    """Return positions without tokens, as `new` has them, in every slot of a static cache."""
    with torch.inference_mode(False):
        return new.new_full((new.shape[0], _capacity(cache), *new.shape[2:]), -1)


def cached_keys(
    cache: Any,
    record: RotationRecord,
    past: Any,
    *,
    attribute: str = "keys",
    has_indexers: bool = False,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the keys that each layer of a cache holds of the first `past` tokens.

    Args:
        cache: Any of transformers' caches, or None.
        record: Its record, which may include more than `past` tokens already.
        past: How many slots are filled.
        attribute: Where a layer holds its rotated keys.
        has_indexers: Whether the caller re-rotates the keys of indexers, too.

    Yields:
        Index of a layer, its keys `[B, K, S, D]` and the positions they were rotated at, `[B, S]`
        or `[B, S, A]`.

    Raises:
        ValueError: The keys cannot be re-rotated, or not without losing gradients.
    """
    require_rerotatable_cache(cache, has_indexers=has_indexers)
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # a copy of keys to the device may still run
    for index, layer in enumerate([] if cache is None else cache.layers):
        keys = getattr(layer, attribute, None)
        if keys is None or keys.numel() == 0:
            continue
        if not torch.compiler.is_compiling():
            keys = _writable_keys(layer, keys)
            setattr(layer, attribute, keys)
        end, slots = past, keys.shape[2]
        if record.static:  # a window that is not full yet starts at the first slot
            end = max(layer.get_seq_length(), slots) if layer.is_sliding else slots
        yield index, keys, positions_of_slots(record, end, slots)


def positions_of_slots(record: RotationRecord, end: Any, slots: int) -> torch.Tensor:
    """Return the positions of the `slots` keys that end before slot `end` of the record.

    Raises:
        ValueError: The record has others than these.
    """
    positions = record.positions[:, max(end - slots, 0) : end]
    if positions.shape[1] != slots:
        raise Refused(
            f"the cache is not as this model left it: expected positions of the {slots} keys that "
            f"a layer holds, got {positions.shape[1]}; change caches by their own methods "
            "(reorder_cache, batch_select_indices, crop)"
        )
    return positions


def carries_gradients(cache: Any) -> bool:
    """Return whether a backward pass may go through the keys that a cache holds now."""
    if cache is None or not torch.is_grad_enabled():
        return False
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return any(key.requires_grad for key in keys if key is not None)


def require_rerotatable_cache(cache: Any, *, has_indexers: bool = False) -> None:
    """Raise if the keys of a cache cannot be re-rotated in place.

    Args:
        cache: Any of transformers' caches, or None.
        has_indexers: Whether the keys of indexers are re-rotated, too (sparse attention).

    Raises:
        ValueError: The message names what to use instead.
    """
    for layer_class in layer_classes(cache):
        if has_indexers and layer_class in INDEXED_LAYERS:
            continue
        if layer_class in REROTATABLE_LAYERS or not issubclass(layer_class, CacheLayerMixin):
            continue
        raise Refused(
            f"the keys of a {type(cache).__name__} ({layer_class.__name__}) cannot be rotated "
            "again, which this method needs when the sequence grows: expected a DynamicCache or a "
            "StaticCache; or say the length beforehand (`handle.fix_length(...)`), or use a method "
            "whose frequencies stay, such as yarn"
        )


def _capacity(cache: Any) -> int:
    """Return the slots that a static cache has in its largest layer; 0 for caches that grow."""
    layers = [] if cache is None else cache.layers
    static = [layer.max_cache_len for layer in layers if isinstance(layer, StaticLayer)]
    return max(static, default=0)


def _writable_keys(layer: Any, keys: torch.Tensor) -> torch.Tensor:
    """Return a layer's keys as a tensor that may be changed in place."""
    if keys.requires_grad and isinstance(layer, StaticLayer):
        raise Refused(
            "the sequence outgrew the frequencies of its cached keys, and gradients flow through "
            "these: a static cache cannot hand out other tensors in their place. Use a "
            "DynamicCache, or torch.no_grad(), or say the length beforehand "
            "(`handle.fix_length(...)`)"
        )
    # Inference tensors may be changed only in inference mode, and tensors that autograd saved for a
    # backward pass not at all.
    outside = keys.is_inference() and not torch.is_inference_mode_enabled()
    saved = keys.requires_grad or torch.is_grad_enabled()
    return keys.clone() if outside or saved else keys


def _record_class_of(cache_class: type) -> type:
    if cache_class not in _RECORD_CLASSES:
        _RECORD_CLASSES[cache_class] = type(
            cache_class.__name__,
            (CacheWithRecord, cache_class),
            {"__module__": cache_class.__module__},
        )
    return _RECORD_CLASSES[cache_class]


def _unpickle(cache_class: type) -> Any:
    return object.__new__(_record_class_of(cache_class))
