"""Frequencies that follow the sequence: per row, and with the cached keys brought along.

Ahead of each forward of the decoder the length of every row is known or looked up; where that
changes a row's frequencies, its cached keys are turned on to the new ones. So every query meets
keys under its own frequencies, whatever was called before and whoever shares the batch.

Where lengths come from: a single new token makes its row one longer, which is counted on the CPU.
Only when the count leaves what the present frequencies serve, or several tokens come at once, are
the positions read from the device.
"""

from __future__ import annotations

import inspect
import itertools
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from rope_patch.cache import UNKNOWN, Record, recall, remember
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.ops.reference import rerotate_
from rope_patch.patching.find import Rotary
from rope_patch.patching.layout import is_interleaved, rotated_layers, takes_rows
from rope_patch.patching.swap import Swaps

# (keys [B, K, S, D], where they were rotated at [B, S], layer type)
Cached = tuple[torch.Tensor, torch.Tensor, str | None]

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class Following:
    """The part of a patch that follows lengths: hooks on one decoder and its rotary module.

    Attributes:
        fixed: The length that every sequence is taken to have, if somebody said so.
        group: The processes that hold parts of the same sequences (context parallelism).
    """

    def __init__(
        self,
        decoder: nn.Module,
        rotary: Rotary,
        method: Method,
        geometries: dict[str | None, Geometry],
        before: dict[str | None, Frequencies],
        config: Any,
    ) -> None:
        self.method = method
        self.geometries = geometries
        self.before = before
        self.trained_length = next(iter(geometries.values())).trained_length
        self.prefixes = {k: p for k, p in rotary.prefixes.items() if k in geometries}
        self.layers = rotated_layers(config)
        self.interleaved = is_interleaved(rotary, config)
        self.takes_rows = takes_rows(rotary, config)
        self.fixed: float | None = None
        self.group: Any = None
        self.owner = uuid.uuid4().hex
        # Each layer type's part of a set: its frequencies, and then its attention factor.
        ends = list(itertools.accumulate(len(before[kind].inv_freq) + 1 for kind in self.prefixes))
        self.parts = {k: (s, e) for k, s, e in zip(self.prefixes, [0, *ends], ends, strict=False)}
        self._names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        self._sets: dict[float, torch.Tensor] = {}
        self._on_device: dict[Any, torch.Tensor] = {}
        self._now: torch.Tensor | None = None
        self._unrecorded: Record | None = None
        self.serial = _announce(self)

    def attach(self, decoder: nn.Module, rotary: Rotary, swaps: Swaps) -> None:
        """Puts the hooks on the live modules."""
        swaps.hook(decoder, before=self.enter, after=self.leave)
        swaps.hook(rotary.module, before=self.rotate)
        for prefix in self.prefixes.values():
            # A tensor from the start: graphs that were compiled without the hooks, which nothing
            # else tells apart, are then not taken for this model.
            one = torch.ones((), device="cpu")
            swaps.set(rotary.module, f"{prefix}attention_scaling", one)
        if not self.takes_rows:
            whole = partial(self.row_by_row, rotary.module, rotary.module.forward)
            swaps.set(rotary.module, "forward", whole)

    # -- the hooks ---------------------------------------------------------------------------------

    def enter(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ahead of the decoder's forward: brings cache and frequencies to the rows' lengths."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return  # the model says itself what it misses
        cache = given.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        past = cache.get_seq_length() if cache is not None else 0
        new = self._positions(given, tokens, past)
        record = self._recalled(cache, past, new)
        self._append(record, cache, past, new)
        if cache is not None:
            remember(cache, record)
        steps = new.shape[1]
        if torch.compiler.is_compiling():
            cached = list(self._cached(cache, record, past, steps))
            self._now = torch.ops.rope_patch.follow(
                [keys for keys, _, _ in cached],
                [slots for _, slots, _ in cached],
                [list(self.parts).index(kind) for _, _, kind in cached],
                record.positions,
                record.bounds,
                record.sets,
                steps,
                self.serial,
            )
        else:
            # Without padding or gaps the lengths need no reading.
            plain = given.get("position_ids") is None and given.get("attention_mask") is None
            known = past + steps if plain and isinstance(past, int) else None
            self._now = self.settle(
                record.bounds,
                record.sets,
                record.positions,
                steps,
                lambda: self._cached(cache, record, past, steps),
                known,
            )
        self._unrecorded = record if cache is None else None

    def leave(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the decoder's forward, failed ones too: a cache it made gets its record."""
        made = getattr(output, "past_key_values", None)
        made = getattr(made, "self_attention_cache", made)
        if self._unrecorded is not None and isinstance(made, Cache):
            remember(made, self._unrecorded)
        self._now = self._unrecorded = None

    def rotate(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ahead of the rotary module's forward: sets the frequencies that it turns by."""
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        kind = given.get("layer_type")
        if kind not in self.prefixes:
            return
        rows = self._now
        if rows is None:  # called by itself: its positions are all there is to know
            positions = given["position_ids"]
            bounds, sets = self._blank(positions.shape[0])
            rows = self.settle(bounds, sets, positions, positions.shape[1], lambda: ())
        start, end = self.parts[kind]
        rows = rows[:, start:end].to(given["x"].device)
        prefix = self.prefixes[kind]
        # [R / 2] where rows turn alike, [B, 1, R / 2] where they do not.
        row = rows[0] if rows.shape[0] == 1 else rows[:, None]
        setattr(module, f"{prefix}inv_freq", row[..., :-1])
        setattr(module, f"{prefix}attention_scaling", row[..., -1:] if row.ndim > 1 else row[-1])

    def row_by_row(
        self,
        module: Any,
        forward: Callable[..., Any],
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None = None,
    ) -> Any:
        """In place of a rotary module's forward that takes no rows: one row after another."""
        kind = () if layer_type is None else (layer_type,)
        prefix = self.prefixes.get(layer_type)
        rows = None if prefix is None else getattr(module, f"{prefix}inv_freq")
        if rows is None or rows.ndim == 1:
            return forward(x, position_ids, *kind)
        scales = getattr(module, f"{prefix}attention_scaling")
        done = []
        for row, scale, at in zip(rows, scales, position_ids.expand(len(rows), -1), strict=True):
            setattr(module, f"{prefix}inv_freq", row[0])
            setattr(module, f"{prefix}attention_scaling", scale)
            done.append(forward(x, at[None], *kind))
        return tuple(torch.cat(parts) for parts in zip(*done, strict=True))

    # -- what rows are rotated by ------------------------------------------------------------------

    def settle(
        self,
        bounds: torch.Tensor,
        sets: torch.Tensor,
        positions: torch.Tensor,
        steps: int,
        cached: Callable[[], Iterable[Cached]],
        known: int | None = None,
    ) -> torch.Tensor:
        """Finds each row's frequencies, and turns its cached keys on where they changed.

        Args:
            bounds: See `Record`; brought up to date in place.
            sets: See `Record`; brought up to date in place.
            positions: Of all tokens, the new ones included, -1 where there is none, `[B, S]`.
            steps: How many of them are new.
            cached: The keys that are cached already.
            known: The rows' length in tokens, where it is the same for all and known.

        Returns:
            Frequencies and attention factors in float32 on the positions' device, `[B, F]`, or
            `[1, F]` where all rows turn alike.
        """
        first, last, served = bounds.unbind(1)
        if steps == 1 and self.fixed is None and bool((last + 2 - first <= served).all()):
            bounds[:, 1] += 1
            return self._to_device(served.tolist(), positions.device)
        if self.fixed is not None:
            reaches = [self._reach(self.fixed)] * len(bounds)
        else:
            spans = self._spans(positions, known)
            bounds[:, :2] = spans
            reaches = [self._reach(end - start + 1) for start, end in spans.tolist()]
        wanted = torch.stack([self._set(reach) for reach in reaches])
        changed = (sets != wanted).any(1)
        if changed.any():
            self._turn(cached(), sets, wanted, changed & ~sets.isnan().any(1))
            sets.copy_(wanted)
        bounds[:, 2] = torch.tensor(reaches, dtype=torch.float64, device="cpu")
        return self._to_device(reaches, positions.device)

    def frequencies(self, length: float) -> dict[str | None, Frequencies]:
        """What a sequence of `length` tokens is rotated by, for each layer type that changes."""
        row = self._set(self._reach(length))
        return {
            kind: Frequencies(row[start : end - 1], row[end - 1].item())
            for kind, (start, end) in self.parts.items()
        }

    def _reach(self, length: float) -> float:
        return self.method.reach(length, self.trained_length)

    def _set(self, reach: float) -> torch.Tensor:
        """Frequencies and attention factors of all layer types, `[F]`, float64, on the CPU."""
        if reach not in self._sets:
            if len(self._sets) > 256:  # growth="exact" asks for a new one with every token
                self._sets.clear()
            self._sets[reach] = torch.cat([self._part(kind, reach) for kind in self.parts])
        return self._sets[reach]

    def _part(self, kind: str | None, reach: float) -> torch.Tensor:
        frequencies = self.method.at(self.geometries[kind], reach)
        if frequencies.close_to(self.before[kind]):  # the very bits of the unpatched model
            frequencies = self.before[kind]
        factor = torch.tensor([frequencies.attention_factor], dtype=torch.float64, device="cpu")
        return torch.cat([frequencies.inv_freq.double(), factor])

    def _to_device(self, reaches: list[float], device: torch.device) -> torch.Tensor:
        key = (tuple(reaches if len(set(reaches)) > 1 else reaches[:1]), device)
        if key not in self._on_device:
            if len(self._on_device) > 64:
                self._on_device.clear()
            rows = torch.stack([self._set(reach) for reach in key[0]])
            self._on_device[key] = rows.to(device, torch.float32)
        return self._on_device[key]

    def _spans(self, positions: torch.Tensor, known: int | None) -> torch.Tensor:
        """First and last position of each row, `[B, 2]`, float64, on the CPU; (0, -1) if empty."""
        group = self.group or _context_parallel_group()
        if known is not None and group is None:
            return torch.tensor([[0, known - 1]], dtype=torch.float64, device="cpu").expand(
                len(positions), 2
            )
        positions = positions.long()  # narrower types have no room for what is no position
        real = positions >= 0
        last = torch.where(real, positions, -1).amax(1)
        first = torch.where(real, positions, torch.iinfo(torch.int64).max).amin(1)
        if group is not None:
            ends = torch.cat([last, -first])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
            last, first = ends.chunk(2)[0], -ends.chunk(2)[1]
        return torch.stack([torch.minimum(first, last + 1), last], dim=1).to("cpu", torch.float64)

    def _turn(
        self,
        cached: Iterable[Cached],
        sets: torch.Tensor,
        wanted: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        """Turns the cached keys of the rows that changed from one set on to the other."""
        rows = changed.nonzero().flatten().tolist()
        if not rows:
            return
        # As one block where all rows change, which is the rule; else row by row, in place.
        blocks = [slice(None)] if len(rows) == len(changed) else [slice(r, r + 1) for r in rows]
        for keys, slots, kind in cached:
            start, end = self.parts[kind]
            for block in blocks:
                old, new = sets[block, start:end], wanted[block, start:end]
                rerotate_(
                    keys[block],
                    slots[block].clamp(min=0),
                    old[:, :-1],
                    new[:, :-1],
                    new[:, -1] / old[:, -1],
                    interleaved=self.interleaved,
                )

    # -- what the cache knows ----------------------------------------------------------------------

    def _positions(self, given: dict[str, Any], tokens: torch.Tensor, past: Any) -> torch.Tensor:
        """Where the new tokens stand, -1 for padding, `[B, S]`."""
        batch, steps = tokens.shape[:2]
        positions = given.get("position_ids")
        if positions is None:
            if (self.group or _context_parallel_group()) is not None:
                raise ValueError(
                    "under context parallelism each process sees a part of the sequence: expected "
                    "position_ids, which say where the tokens stand in the whole of it"
                )
            positions = (torch.arange(steps, device=tokens.device) + past)[None]
        positions = positions.expand(batch, -1)
        mask = given.get("attention_mask")
        # Masks of other shapes were made from a 2-D one, as were the position_ids beside them.
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= steps:
            mask = mask[:, -steps:].to(positions.device)
            positions = torch.where(mask.bool(), positions, -1)
        return positions

    def _recalled(self, cache: Any, past: Any, new: torch.Tensor) -> Record:
        """The cache's record, made to fit what the cache holds now; a new one for an empty cache.

        Raises:
            ValueError: The cache cannot be followed; it is as it was.
        """
        if cache is not None and self.fixed is None:
            _require_followable(cache)
        record = recall(cache)
        if record is None:
            if not torch.compiler.is_compiling() and int(past) > 0:
                raise ValueError(
                    f"the cache holds {past} tokens, and no record of how their keys were rotated: "
                    "it was filled before the model was patched, or rebuilt from its tensors. "
                    "Expected an empty cache, or one that this patched model filled; copy caches "
                    "with copy.deepcopy, which keeps the record"
                )
            bounds, sets = self._blank(new.shape[0])
            with torch.inference_mode(False):  # a cache may be used outside of it later
                positions = new.new_full((new.shape[0], _capacity(cache)), -1)
            return Record(self.owner, positions, bounds, sets)
        if record.sets.shape[1] != self._set(self._reach(1)).shape[0]:
            raise ValueError(
                "the cache was filled under a patch of other layer types: expected an empty cache, "
                "or one that was filled under this patch"
            )
        static = _capacity(cache) > 0
        if record.positions.shape[0] != new.shape[0] or (
            not static and record.positions.shape[1] < past
        ):
            raise ValueError(
                f"the cache is not as this model left it: expected {record.positions.shape[0]} "
                f"rows of {record.positions.shape[1]} tokens, got {new.shape[0]} rows of {past}; "
                "change caches by their own methods (reorder_cache, batch_select_indices, crop)"
            )
        if record.owner != self.owner:  # under another patch: what it served is not what we serve
            record.owner = self.owner
            record.bounds.fill_(UNKNOWN)
        if not static and record.positions.shape[1] > past:
            record.cut(past)
        return record

    def _append(self, record: Record, cache: Any, past: Any, new: torch.Tensor) -> None:
        """Writes down where the new tokens stand."""
        if not _capacity(cache):
            record.positions = torch.cat([record.positions, new], dim=1)
            return
        slot = torch.arange(record.positions.shape[1], device=new.device)
        record.positions.masked_fill_(slot >= past, -1)  # what a reset or a failure left there
        at = torch.arange(new.shape[1], device=new.device) + past
        record.positions.index_copy_(1, at, new.to(record.positions.dtype))

    def _cached(self, cache: Any, record: Record, past: Any, steps: int) -> Iterator[Cached]:
        """The rotated keys that the cache holds already, with where they were rotated at."""
        if cache is None:
            return
        if getattr(cache, "offloading", False) and torch.cuda.is_available():
            torch.cuda.synchronize()  # keys may still be on their way
        for layer, kind in zip(cache.layers, self.layers, strict=False):
            keys = getattr(layer, "keys", None)
            if kind not in self.parts or keys is None or keys.numel() == 0:
                continue
            if not torch.compiler.is_compiling():
                layer.keys = keys = _writable(keys)
            held = keys.shape[2]
            if not _capacity(cache):
                slots = record.positions[:, past - held : past]
            elif getattr(layer, "is_sliding", False):
                filled = max(layer.cumulative_length_int, held)
                slots = record.positions[:, filled - held : filled]
            else:
                slots = record.positions
            yield keys, slots, kind

    def _blank(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(end for _, end in self.parts.values())
        with torch.inference_mode(False):
            unknown = partial(torch.full, fill_value=UNKNOWN, dtype=torch.float64, device="cpu")
            return unknown((batch, 3)), unknown((batch, width))

    # -- copies ------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.serial = _announce(self)


def _require_followable(cache: Any) -> None:
    for layer in cache.layers or [getattr(cache, "layer_class_to_replicate", None)]:
        kind = layer if isinstance(layer, type) else type(layer)
        if kind in _LAYERS or not issubclass(kind, CacheLayerMixin):
            continue
        raise ValueError(
            f"the keys of a {type(cache).__name__} ({kind.__name__}) cannot be rotated again, "
            "which this method needs when the sequence grows: expected a DynamicCache or a "
            "StaticCache; or say the length beforehand (`handle.fix_length(...)`), or use a method "
            "whose frequencies stay, such as yarn"
        )


def _capacity(cache: Any) -> int:
    """Slots that a static cache has for the whole sequence; 0 for caches that grow."""
    slots = 0
    for layer in [] if cache is None else cache.layers:
        if isinstance(layer, StaticLayer) and not layer.is_sliding:
            slots = max(slots, layer.max_cache_len)
    return slots


def _writable(keys: torch.Tensor) -> torch.Tensor:
    """Keys that may be changed in place: what inference mode made may be only within it."""
    outside = keys.is_inference() and not torch.is_inference_mode_enabled()
    return keys.clone() if outside else keys


def _context_parallel_group() -> Any:
    """The processes that share sequences in accelerate's context parallelism, or None."""
    shared = AcceleratorState._shared_state
    parallelism = shared.get("parallelism_config") if shared else None
    if parallelism is None or not parallelism.cp_enabled:
        return None
    return AcceleratorState().device_mesh["cp"].get_group()


# -- torch.compile: what depends on numbers stays out of the graph, as one operator ----------------

_ALIVE: weakref.WeakValueDictionary[int, Following] = weakref.WeakValueDictionary()
_SERIALS = itertools.count()


def _announce(following: Following) -> int:
    serial = next(_SERIALS)
    _ALIVE[serial] = following
    return serial


@torch.library.custom_op("rope_patch::follow", mutates_args=("keys", "bounds", "sets"))
def _follow(
    keys: list[torch.Tensor],
    slots: list[torch.Tensor],
    kinds: list[int],
    positions: torch.Tensor,
    bounds: torch.Tensor,
    sets: torch.Tensor,
    steps: int,
    serial: int,
) -> torch.Tensor:
    following = _ALIVE[serial]
    names = list(following.parts)
    cached = [(k, s, names[i]) for k, s, i in zip(keys, slots, kinds, strict=True)]
    rows = following.settle(bounds, sets, positions, steps, lambda: cached)
    return rows.expand(positions.shape[0], -1).clone()


@_follow.register_fake
def _(
    keys: list[torch.Tensor],
    slots: list[torch.Tensor],
    kinds: list[int],
    positions: torch.Tensor,
    bounds: torch.Tensor,
    sets: torch.Tensor,
    steps: int,
    serial: int,
) -> torch.Tensor:
    return positions.new_empty(sets.shape, dtype=torch.float32)
