"""Frequencies that follow the sequence: per row, and with the cached keys brought along.

Ahead of each forward of the decoder the length of every row is known or looked up; where that
changes a row's frequencies, its cached keys are turned on to the new ones. So every query meets
keys under its own frequencies, whatever was called before and whoever shares the batch.

Where lengths come from: of a single new token its position alone is read, and not even that where
it is certain: without position_ids, and in generate (see `generation_loop`). Only when it leaves
what the present frequencies serve, or several tokens come at once, are all positions read from the
device.
"""

from __future__ import annotations

import inspect
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.patching.architecture.layout import is_interleaved, rotated_layers, takes_rows
from rope_patch.patching.architecture.probe import row_by_row
from rope_patch.patching.architecture.rotary_modules import Rotary
from rope_patch.patching.dynamic import compile_op
from rope_patch.patching.dynamic.batching_guard import require_no_pages
from rope_patch.patching.dynamic.cache_record import (
    UNKNOWN,
    Record,
    blank_positions,
    cached_keys,
    carries_gradients,
    made_cache,
    recall,
    remember,
    require_turnable,
)
from rope_patch.patching.dynamic.frequency_table import Sets
from rope_patch.patching.dynamic.generation_loop import GenerationLoop
from rope_patch.patching.dynamic.rerotation import Cached, Turning
from rope_patch.patching.dynamic.sequence_lengths import context_parallel_group, positions_of, spans
from rope_patch.patching.undo_log import Swaps


class Now(threading.local):
    """What a forward has found out so far, in the thread that it runs in.

    Attributes:
        rows: What the rows are rotated by; None outside of the decoder's forward.
        unrecorded: The record of a cache that the decoder has yet to make.
        resting: The name of the rotary module's buffer that stands aside, the buffer, and whether
            other threads wait for it to come back; None outside of the rotary module's forward.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.unrecorded: Record | None = None
        self.resting: tuple[str, torch.Tensor, bool] | None = None


class Following:
    """The part of a patch that follows lengths: hooks on one decoder and its rotary module.

    Several threads may use the model at once, each with a cache of its own: what a forward finds
    out is kept by thread, and while one is in the rotary module's forward, the others wait.

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
        # What the rotary module calls each layer type's frequencies and attention factor.
        self.names = {
            kind: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for kind, prefix in rotary.prefixes.items()
            if kind in geometries
        }
        self.layers = rotated_layers(decoder, config)
        self.interleaved = is_interleaved(rotary, config)
        self.takes_rows = takes_rows(rotary, config)
        self.fixed: float | None = None
        self.group: Any = None
        self.kernels: str | None = None  # by whom positions are rotated to, where they are
        self.owner = uuid.uuid4().hex
        self.sets = Sets(method, geometries, before, self.names)
        self.parts = self.sets.parts
        self.width = self.sets.width
        self.layout = (tuple(self.parts.items()), method.kept_tokens)
        self._names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        self.loop = GenerationLoop()
        self._now = Now()
        self._turning = threading.RLock()
        self.serial = compile_op.announce(self)

    def attach(self, decoder: nn.Module, rotary: Rotary, swaps: Swaps) -> None:
        """Puts the hooks on the live modules."""
        swaps.hook(decoder, before=self.enter, after=self.leave)
        swaps.hook(rotary.module, before=self.rotate, after=self.rest)
        for _, scale_name in self.names.values():
            # A tensor from the start: graphs that were compiled without the hooks, which nothing
            # else tells apart, are then not taken for this model.
            one = torch.ones((), device="cpu")
            swaps.set(rotary.module, scale_name, one)
        if not self.takes_rows:
            whole = partial(row_by_row, self.names, rotary.module, rotary.module.forward)
            swaps.set(rotary.module, "forward", whole)

    # -- the hooks ---------------------------------------------------------------------------------

    def enter(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ahead of the decoder's forward: brings cache and frequencies to the rows' lengths."""
        given = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return  # the model says itself what it misses
        if self.fixed is None:
            require_no_pages(given, self.method)
        cache = given.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        if torch.compiler.is_compiling() and carries_gradients(cache):
            # The operator of graphs re-rotates keys in place; so this breaks the graph instead.
            from rope_patch.patching.dynamic.graph_break import (
                prepare,  # which imports the compiler
            )

            prepare(self, given, tokens, cache)
        else:
            self.prepare(given, tokens, cache)

    def prepare(self, given: dict[str, Any], tokens: torch.Tensor, cache: Any) -> None:
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(past, torch.Tensor) and given.get("cache_position") is not None:
            past = given["cache_position"][0]  # transformers 5.0 counts static slots by content
        new = positions_of(given, tokens, past, shared=self._group() is not None)
        record = recall(cache, past, new.shape[0], self.layout, self.owner)
        if record is None:
            if self.fixed is None:
                require_turnable(cache)
            record = Record.blank(self.owner, blank_positions(cache, new), self.width, self.layout)
        record.append(past, new)
        if cache is not None:
            remember(cache, record)
        if torch.compiler.is_compiling():
            cached = list(self._cached(cache, record, past))
            self._now.rows = torch.ops.rope_patch.follow(
                [keys for keys, _, _ in cached],
                [slots for _, slots, _ in cached],
                [list(self.parts).index(kind) for _, _, kind in cached],
                record.positions,
                new,
                record.bounds,
                record.sets,
                self.serial,
            )
        else:
            counted = given.get("position_ids") is None and isinstance(past, int)
            # A whole sequence without padding or gaps: its length needs no reading.
            plain = counted and past == 0 and given.get("attention_mask") is None
            at = self.loop.take(given.get("position_ids"))
            self._now.rows = self.settle(
                record.bounds,
                record.sets,
                record.positions,
                new,
                lambda: self._cached(cache, record, past),
                new.shape[1] if plain else None,
                [past] * len(new) if counted else at,
            )
        self._now.unrecorded = record if cache is None else None

    def leave(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the decoder's forward, failed ones too: a cache it made gets its record."""
        if self._now.unrecorded is not None:
            made = made_cache(output)
            if isinstance(made, Cache):
                remember(made, self._now.unrecorded)
        self._now.rows = self._now.unrecorded = None

    def rotate(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ahead of the rotary module's forward: sets the frequencies that it turns by."""
        kind = args[2] if len(args) > 2 else kwargs.get("layer_type")
        if kind not in self.names:
            return
        rows = self._now.rows
        if rows is None:  # called by itself: its positions are all there is to know
            positions = args[1] if len(args) > 1 else kwargs["position_ids"]
            own = Record.blank(self.owner, positions, self.width, self.layout)
            rows = self.settle(own.bounds, own.sets, positions, positions, lambda: ())
        x = args[0] if args else kwargs["x"]
        inv_freq, scale = self.sets.split(rows, kind, x.device)
        name, scale_name = self.names[kind]
        if torch.compiler.is_compiling():  # the graph has them to itself
            self._now.resting = (name, module._buffers[name], False)
            setattr(module, name, inv_freq)
            setattr(module, scale_name, scale)
            return
        if self._now.resting is not None:  # Ctrl-C in a forward leaves hooks behind uncalled
            self.rest(module, args, kwargs, None)
        self._turning.acquire()
        self._now.resting = (name, module._buffers[name], True)
        module._buffers[name] = inv_freq  # as setattr does, ten times as fast
        module.__dict__[scale_name] = scale

    def rest(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """After the rotary module's forward: its buffer is again what it is in all processes.

        DistributedDataParallel writes the buffers of one process over those of the others, which
        may have rows of other lengths.
        """
        if self._now.resting is None:
            return
        name, resting, awaited = self._now.resting
        self._now.resting = None
        if torch.compiler.is_compiling():
            setattr(module, name, resting)
            return
        module._buffers[name] = resting
        if awaited:
            self._turning.release()

    # -- what rows are rotated by ------------------------------------------------------------------

    def settle(
        self,
        bounds: torch.Tensor,
        sets: torch.Tensor,
        positions: torch.Tensor,
        new: torch.Tensor,
        cached: Callable[[], Iterable[Cached]],
        known: int | None = None,
        at: list[float] | None = None,
    ) -> torch.Tensor:
        """Finds each row's frequencies, and turns its cached keys on where they changed.

        Args:
            bounds: See `Record`; brought up to date in place.
            sets: See `Record`; brought up to date in place.
            positions: Of all tokens, the new ones included, -1 where there is none, `[B, S]`.
            new: Of the new tokens, `[B, S]`.
            cached: The keys that are cached already.
            known: The rows' length in tokens, where it is the same for all and known.
            at: Of a single new token in each row, where it is known; else it is read from `new`.

        Returns:
            Frequencies and attention factors in float32 on the positions' device, `[B, F]`, or
            `[1, F]` where all rows turn alike.
        """
        if new.shape[1] == 1 and self.fixed is None and self._group() is None:
            if at is None:
                at = new[:, 0].tolist()
            self.loop.note(at)
            if self._serves(bounds, at):
                return self.sets.to_device(bounds[:, 2].tolist(), positions.device)
        if self.fixed is not None:
            bounds[:, :2] = UNKNOWN
            reaches = [self.sets.reach(self.fixed)] * len(bounds)
        else:
            group = self._group()
            if known is not None and group is None:
                bounds[:, 0], bounds[:, 1] = 0, known - 1
            else:
                bounds[:, :2] = spans(positions, group)
            reaches = [self.sets.reach(end - start + 1) for start, end, _ in bounds.tolist()]
        wanted = torch.stack([self.sets.at(reach) for reach in reaches])
        changed = (sets != wanted).any(1)
        if changed.any():
            self._turn(cached(), sets, wanted, changed & ~sets.isnan().any(1))
            sets.copy_(wanted)
        bounds[:, 2] = torch.tensor(reaches, dtype=torch.float64, device="cpu")
        return self.sets.to_device(reaches, positions.device)

    def _serves(self, bounds: torch.Tensor, at: list[float]) -> bool:
        """Widen the rows' bounds to one more position each, if their frequencies serve that too."""
        # In Python's and NumPy's numbers: for the few rows of a batch the quickest way.
        spans, ends = [], bounds.tolist()
        for (first, last, served), position in zip(ends, at, strict=True):
            if position >= 0:  # not hidden by a mask
                first, last = min(first, position), max(last, position)
            if not last + 1 - first <= served:  # nor is it where bounds are unknown
                return False
            spans.append((first, last))
        bounds.numpy()[:, :2] = spans
        return True

    def frequencies(self, length: float) -> dict[str | None, Frequencies]:
        """What a sequence of `length` tokens is rotated by, for each layer type that changes."""
        return self.sets.frequencies(length)

    def _group(self) -> Any:
        return self.group or context_parallel_group()

    def _cached(self, cache: Any, record: Record, past: Any) -> Iterator[Cached]:
        for index, keys, slots in cached_keys(cache, record, past):
            if index < len(self.layers) and self.layers[index] in self.parts:
                yield keys, slots, self.layers[index]

    def _turn(
        self,
        cached: Iterable[Cached],
        sets: torch.Tensor,
        wanted: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        """See `Turning.turn`."""
        kept = self.method.kept_tokens
        turning = Turning(self.parts, self.interleaved, self.kernels, kept)
        turning.turn(cached, sets, wanted, changed)

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("loop", "_now", "_turning")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.loop = GenerationLoop()
        self._now = Now()
        self._turning = threading.RLock()
        self.serial = compile_op.announce(self)
