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
from rope_patch.patching.architecture.layout import (
    is_interleaved,
    rotated_layer_types,
    supports_per_row_frequencies,
)
from rope_patch.patching.architecture.probe import forward_per_row
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.dynamic import compile_op
from rope_patch.patching.dynamic.batching_guard import require_no_paged_cache
from rope_patch.patching.dynamic.cache_record import (
    UNKNOWN,
    RotationRecord,
    attach_record,
    cache_in_output,
    cached_keys,
    carries_gradients,
    empty_positions,
    get_record,
    require_rerotatable_cache,
)
from rope_patch.patching.dynamic.frequency_table import FrequencyTable
from rope_patch.patching.dynamic.generation_loop import GenerationLoop
from rope_patch.patching.dynamic.rerotation import CachedKeys, KeyRerotation
from rope_patch.patching.dynamic.sequence_lengths import (
    context_parallel_group,
    first_and_last_positions,
    token_positions,
)
from rope_patch.patching.undo_log import UndoLog


class ForwardState(threading.local):
    """What a forward has found out so far, in the thread that it runs in.

    Attributes:
        rows: What the rows are rotated by; None outside of the decoder's forward.
        pending_record: The record of a cache that the decoder has yet to make.
        saved_buffer: The name of the rotary module's buffer that stands aside, the buffer, and
            whether other threads wait for it to come back; None outside of the rotary module's
        forward.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.pending_record: RotationRecord | None = None
        self.saved_buffer: tuple[str, torch.Tensor, bool] | None = None


class LengthHooks:
    """The part of a patch that follows lengths: hooks on one decoder and its rotary module.

    Several threads may use the model at once, each with a cache of its own: what a forward finds
    out is kept by thread, and while one is in the rotary module's forward, the others wait.

    Attributes:
        fixed_length: The length that every sequence is taken to have, if somebody said so.
        group: The processes that hold parts of the same sequences (context parallelism).
    """

    def __init__(
        self,
        decoder: nn.Module,
        rotary: RotaryModule,
        method: Method,
        geometries: dict[str | None, Geometry],
        before: dict[str | None, Frequencies],
        config: Any,
    ) -> None:
        self.method = method
        # What the rotary module calls each layer type's frequencies and attention factor.
        self.attribute_names = {
            kind: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for kind, prefix in rotary.prefixes.items()
            if kind in geometries
        }
        self.rotated_layer_types = rotated_layer_types(decoder, config)
        self.interleaved = is_interleaved(rotary, config)
        self.supports_per_row_frequencies = supports_per_row_frequencies(rotary, config)
        self.fixed_length: float | None = None
        self.group: Any = None
        self.kernels: str | None = None  # by whom positions are rotated to, where they are
        self.patch_id = uuid.uuid4().hex
        self.frequency_table = FrequencyTable(method, geometries, before, self.attribute_names)
        self.slices = self.frequency_table.slices
        self.row_width = self.frequency_table.row_width
        self.record_layout = (tuple(self.slices.items()), method.start_token_count)
        self._parameter_names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        self.generation_loop = GenerationLoop()
        self._state = ForwardState()
        self._lock = threading.RLock()
        self.op_handle = compile_op.register_hooks(self)

    def attach(self, decoder: nn.Module, rotary: RotaryModule, undo_log: UndoLog) -> None:
        """Puts the hooks on the live modules."""
        undo_log.hook(decoder, before=self.before_decoder, after=self.after_decoder)
        undo_log.hook(rotary.module, before=self.before_rotary, after=self.after_rotary)
        for _, scale_name in self.attribute_names.values():
            # A tensor from the start: graphs that were compiled without the hooks, which nothing
            # else tells apart, are then not taken for this model.
            one = torch.ones((), device="cpu")
            undo_log.set(rotary.module, scale_name, one)
        if not self.supports_per_row_frequencies:
            whole = partial(
                forward_per_row, self.attribute_names, rotary.module, rotary.module.forward
            )
            undo_log.set(rotary.module, "forward", whole)

    # -- the hooks ---------------------------------------------------------------------------------

    def before_decoder(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Ahead of the decoder's forward: brings cache and frequencies to the rows' lengths."""
        given = (
            kwargs if not args else dict(zip(self._parameter_names, args, strict=False)) | kwargs
        )
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return  # the model says itself what it misses
        if self.fixed_length is None:
            require_no_paged_cache(given, self.method)
        cache = given.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        if torch.compiler.is_compiling() and carries_gradients(cache):
            # The operator of graphs re-rotates keys in place; so this breaks the graph instead.
            from rope_patch.patching.dynamic.graph_break import (
                prepare_outside_graph,  # which imports the compiler
            )

            prepare_outside_graph(self, given, tokens, cache)
        else:
            self.prepare(given, tokens, cache)

    def prepare(self, given: dict[str, Any], tokens: torch.Tensor, cache: Any) -> None:
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(past, torch.Tensor) and given.get("cache_position") is not None:
            past = given["cache_position"][0]  # transformers 5.0 counts static slots by content
        new = token_positions(given, tokens, past, shared=self._sharing_group() is not None)
        record = get_record(cache, past, new.shape[0], self.record_layout, self.patch_id)
        if record is None:
            if self.fixed_length is None:
                require_rerotatable_cache(cache)
            record = RotationRecord.empty(
                self.patch_id, empty_positions(cache, new), self.row_width, self.record_layout
            )
        record.append(past, new)
        if cache is not None:
            attach_record(cache, record)
        if torch.compiler.is_compiling():
            cached = list(self._cached_keys(cache, record, past))
            self._state.rows = torch.ops.rope_patch.follow(
                [keys for keys, _, _ in cached],
                [slots for _, slots, _ in cached],
                [list(self.slices).index(kind) for _, _, kind in cached],
                record.positions,
                new,
                record.row_spans,
                record.frequencies,
                self.op_handle,
            )
        else:
            counted = given.get("position_ids") is None and isinstance(past, int)
            # A whole sequence without padding or gaps: its length needs no reading.
            plain = counted and past == 0 and given.get("attention_mask") is None
            at = self.generation_loop.take(given.get("position_ids"))
            self._state.rows = self.update_rows(
                record.row_spans,
                record.frequencies,
                record.positions,
                new,
                lambda: self._cached_keys(cache, record, past),
                new.shape[1] if plain else None,
                [past] * len(new) if counted else at,
            )
        self._state.pending_record = record if cache is None else None

    def after_decoder(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the decoder's forward, failed ones too: a cache it made gets its record."""
        if self._state.pending_record is not None:
            made = cache_in_output(output)
            if isinstance(made, Cache):
                attach_record(made, self._state.pending_record)
        self._state.rows = self._state.pending_record = None

    def before_rotary(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ahead of the rotary module's forward: sets the frequencies that it turns by."""
        kind = args[2] if len(args) > 2 else kwargs.get("layer_type")
        if kind not in self.attribute_names:
            return
        rows = self._state.rows
        if rows is None:  # called by itself: its positions are all there is to know
            positions = args[1] if len(args) > 1 else kwargs["position_ids"]
            own = RotationRecord.empty(self.patch_id, positions, self.row_width, self.record_layout)
            rows = self.update_rows(
                own.row_spans, own.frequencies, positions, positions, lambda: ()
            )
        x = args[0] if args else kwargs["x"]
        inv_freq, scale = self.frequency_table.per_layer_type(rows, kind, x.device)
        name, scale_name = self.attribute_names[kind]
        if torch.compiler.is_compiling():  # the graph has them to itself
            self._state.saved_buffer = (name, module._buffers[name], False)
            setattr(module, name, inv_freq)
            setattr(module, scale_name, scale)
            return
        if self._state.saved_buffer is not None:  # Ctrl-C in a forward leaves hooks behind uncalled
            self.after_rotary(module, args, kwargs, None)
        self._lock.acquire()
        self._state.saved_buffer = (name, module._buffers[name], True)
        module._buffers[name] = inv_freq  # as setattr does, ten times as fast
        module.__dict__[scale_name] = scale

    def after_rotary(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """After the rotary module's forward: its buffer is again what it is in all processes.

        DistributedDataParallel writes the buffers of one process over those of the others, which
        may have rows of other lengths.
        """
        if self._state.saved_buffer is None:
            return
        name, resting, awaited = self._state.saved_buffer
        self._state.saved_buffer = None
        if torch.compiler.is_compiling():
            setattr(module, name, resting)
            return
        module._buffers[name] = resting
        if awaited:
            self._lock.release()

    # -- what rows are rotated by ------------------------------------------------------------------

    def update_rows(
        self,
        row_spans: torch.Tensor,
        frequencies: torch.Tensor,
        positions: torch.Tensor,
        new_positions: torch.Tensor,
        cached: Callable[[], Iterable[CachedKeys]],
        known_length: int | None = None,
        next_positions: list[float] | None = None,
    ) -> torch.Tensor:
        """Finds each row's frequencies, and turns its cached keys on where they changed.

        Args:
            row_spans: See `RotationRecord`; brought up to date in place.
            frequencies: See `RotationRecord`; brought up to date in place.
            positions: Of all tokens, the new ones included, -1 where there is none, `[B, S]`.
            new_positions: Of the new tokens, `[B, S]`.
            cached: The keys that are cached already.
            known_length: The rows' length in tokens, where it is the same for all and known.
            next_positions: Of a single new token in each row, where it is known; else it is read
                from `new_positions`.

        Returns:
            Frequencies and attention factors in float32 on the positions' device, `[B, F]`, or
            `[1, F]` where all rows turn alike.
        """
        if (
            new_positions.shape[1] == 1
            and self.fixed_length is None
            and self._sharing_group() is None
        ):
            if next_positions is None:
                next_positions = new_positions[:, 0].tolist()
            self.generation_loop.note_positions(next_positions)
            if self._extend_spans(row_spans, next_positions):
                return self.frequency_table.rows_on(row_spans[:, 2].tolist(), positions.device)
        if self.fixed_length is not None:
            row_spans[:, :2] = UNKNOWN
            reaches = [self.frequency_table.valid_until(self.fixed_length)] * len(row_spans)
        else:
            group = self._sharing_group()
            if known_length is not None and group is None:
                row_spans[:, 0], row_spans[:, 1] = 0, known_length - 1
            else:
                row_spans[:, :2] = first_and_last_positions(positions, group)
            reaches = [
                self.frequency_table.valid_until(end - start + 1)
                for start, end, _ in row_spans.tolist()
            ]
        wanted = torch.stack([self.frequency_table.row(reach) for reach in reaches])
        changed = (frequencies != wanted).any(1)
        if changed.any():
            self._rerotate(cached(), frequencies, wanted, changed & ~frequencies.isnan().any(1))
            frequencies.copy_(wanted)
        row_spans[:, 2] = torch.tensor(reaches, dtype=torch.float64, device="cpu")
        return self.frequency_table.rows_on(reaches, positions.device)

    def _extend_spans(self, bounds: torch.Tensor, at: list[float]) -> bool:
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
        return self.frequency_table.frequencies(length)

    def _sharing_group(self) -> Any:
        return self.group or context_parallel_group()

    def _cached_keys(self, cache: Any, record: RotationRecord, past: Any) -> Iterator[CachedKeys]:
        for index, keys, slots in cached_keys(cache, record, past):
            if (
                index < len(self.rotated_layer_types)
                and self.rotated_layer_types[index] in self.slices
            ):
                yield keys, slots, self.rotated_layer_types[index]

    def _rerotate(
        self,
        cached: Iterable[CachedKeys],
        sets: torch.Tensor,
        wanted: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        """See `KeyRerotation.rerotate`."""
        kept = self.method.start_token_count
        turning = KeyRerotation(self.slices, self.interleaved, self.kernels, kept)
        turning.rerotate(cached, sets, wanted, changed)

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v for k, v in vars(self).items() if k not in ("generation_loop", "_state", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generation_loop = GenerationLoop()
        self._state = ForwardState()
        self._lock = threading.RLock()
        self.op_handle = compile_op.register_hooks(self)
