"""Hooks that follow the length of each row and keep its cached keys at the same frequencies.

One decode step of a dynamic method, where `hooks` are the `LengthHooks` of the decoder:

    generate            hooks               cache record       frequency table      rotary module
       | step inputs      |                      |                    |                   |
       |--(generation_loop: next positions)-->   |                    |                   |
       | decoder(...)     |                      |                    |                   |
       |----------------->| before_decoder       |                    |                   |
       |                  |--get_record--------->| spans, frequencies |                   |
       |                  |--append------------->| new positions      |                   |
       |                  | update_rows          |                    |                   |
       |                  |   the row's frequencies serve the new position:               |
       |                  |----------------------------rows_on------->| the same rows     |
       |                  |   they do not:       |                    |                   |
       |                  |----------------------------row----------->| new row           |
       |                  |--rerotate (rerotation.py)-> cached keys, in place             |
       |                  |                      |                    |                   |
       |                  | before_rotary: inv_freq and attention factor of this forward  |
       |                  |-------------------------------------------------------------->|
       |                  |                      |                  cos and sin, or       |
       |                  |                      |                  packed frequencies    |
       |                  | after_rotary: the module's own buffer again                   |
       |                  |-------------------------------------------------------------->|
       |   attention rotates and caches the new keys (kernels/attention_forward.py)       |
       |                  | after_decoder: attach_record to a cache made in this forward  |
       |<-----------------|                      |                    |                   |

So every query meets keys under its own frequencies, whichever rows share the batch. Within
torch.compile, `update_rows` runs behind an op (see `frequency_table`).

Lengths are read from the device as seldom as possible. For a single new token only its position is
read. Nothing is read where the position is certain: without position_ids, where the rule of
positions counted them, and in generate (see `generation`). All positions are read when the
present frequencies do not serve the new position, or when several tokens come at once.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.patching.architecture.attention_source import rotated_layer_types
from rope_patch.patching.architecture.frequency_buffers import forward_per_row
from rope_patch.patching.architecture.rotary_traits import AXES, KeyLayout, RotaryTraits
from rope_patch.patching.dynamic import frequency_table
from rope_patch.patching.dynamic.cache_record import (
    UNKNOWN,
    RotationRecord,
    attach_record,
    cached_keys,
    carries_gradients,
    empty_positions,
    get_record,
    require_rerotatable_cache,
)
from rope_patch.patching.dynamic.frequency_table import FrequencyTable
from rope_patch.patching.dynamic.generation import (
    Admission,
    GenerationLoop,
    paged_cache_refusal,
    require_no_paged_cache,
)
from rope_patch.patching.dynamic.latent_cache import LatentCache, attach_softmax_factor
from rope_patch.patching.dynamic.rerotation import CachedKeys, KeyRerotation
from rope_patch.patching.positions import (
    PositionRule,
    axis_positions,
    context_parallel_group,
    extend_spans,
    first_and_last_positions,
    token_extents,
    token_positions,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import Cache, cache_in_output, is_paged
from rope_patch.transformers_api.forwards import ForwardCall, rotary_arguments
from rope_patch.utils.errors import Refused


class ForwardState(threading.local):
    """State of one forward, per thread.

    Attributes:
        rows: The rows' frequencies, `[B, F]`; None outside of the decoder's forward.
        reaches: The length that each row's frequencies serve, as of the last update.
        pending_record: The record of a cache that the decoder has yet to make.
        saved_buffer: (name, original buffer, lock held), which `after_rotary` must restore; None
            outside of the rotary module's forward.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.reaches: list[float] = []
        self.pending_record: RotationRecord | None = None
        self.saved_buffer: tuple[str, torch.Tensor, bool] | None = None


class LengthHooks:
    """Hooks on one decoder and its rotary module that update frequencies with the length.

    Several threads may use the model at once, each with its own cache: the state of a forward is
    per thread, and only one thread at a time runs the rotary module's forward.

    Attributes:
        axes: A, if a token has a position on each of A axes (M-RoPE); None if it has one.
        fixed_length: The length assumed for every sequence; None to measure each.
        group: The processes that hold parts of the same sequences (context parallelism).
        position_rule: The model's rule, which may have counted a forward's positions.
        rotaries: The decoder's rotary modules, which rotate alike.
    """

    def __init__(
        self, traits: RotaryTraits, method: Method, geometries: dict[str | None, Geometry]
    ) -> None:
        self.method = method
        # Attributes of the rotary module: frequencies and attention factor of each layer type.
        self.attribute_names = {
            layer_type: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for layer_type, prefix in traits.rotary.prefixes.items()
            if layer_type in geometries
        }
        decoder = traits.require_decoder(is_owner=False)
        self.rotaries = [traits.rotary]
        latent = LatentCache.of(traits)
        self.key_layout = KeyLayout(latent.interleaved) if latent else KeyLayout.of(traits)
        self.axes = None if self.key_layout.sections is None else AXES
        types = latent.layer_types if latent else rotated_layer_types(decoder, traits.config)
        self.rotated_layer_types = types
        self.has_indexers = latent is not None and latent.has_indexers
        self._keys_in_cache = latent.cached_keys if latent else cached_keys
        self.supports_per_row_frequencies = traits.supports_per_row_frequencies
        self.fixed_length: float | None = None
        self.group: Any = None
        self.position_rule: PositionRule | None = None
        self.kernels: str | None = None  # the kernels that take positions; None if none do
        self.patch_id = uuid.uuid4().hex
        self.frequency_table = FrequencyTable(
            method, geometries, traits.frequencies, self.attribute_names
        )
        self.slices = self.frequency_table.slices
        self.row_width = self.frequency_table.row_width
        self.record_layout = (tuple(self.slices.items()), method.start_token_count)
        self._start_thread_state()

    def _start_thread_state(self) -> None:
        self.generation_loop, self.admission = GenerationLoop(), Admission()
        self._state, self._lock = ForwardState(), threading.RLock()
        self.op_handle = frequency_table.register_hooks(self)

    def attach(self, decoder: nn.Module, undo_log: UndoLog) -> None:
        """Install the hooks on the live modules."""
        undo_log.hook(decoder, before=self.before_decoder, after=self.after_decoder)
        attach_softmax_factor(decoder, self, undo_log)
        for module in [rotary.module for rotary in self.rotaries]:
            undo_log.hook(module, before=self.before_rotary, after=self.after_rotary)
            for _, scale_name in self.attribute_names.values():
                # A tensor from the start: else torch.compile takes a graph from before the hooks.
                undo_log.set(module, scale_name, torch.ones((), device="cpu"))
            if not self.supports_per_row_frequencies:
                whole = partial(forward_per_row, self.attribute_names, module, module.forward)
                undo_log.set(module, "forward", whole)

    # -- the hooks ---------------------------------------------------------------------------------

    def before_decoder(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Bring cache and frequencies to the rows' new lengths (pre-hook of the decoder)."""
        call = ForwardCall(decoder, args, kwargs)
        tokens, cache = call.tokens, call.cache
        if tokens is None:
            return  # the model raises an error of its own
        if self.fixed_length is None:
            require_no_paged_cache(cache, paged_cache_refusal(self.method))
        elif is_paged(cache):
            cache = None  # its keys stay as they are, whoever asks for them
        if torch.compiler.is_compiling() and carries_gradients(cache):
            # The op would lose gradients. Imported here, because the module imports the compiler.
            from rope_patch.patching.dynamic.graph_break import call_outside_graph

            call_outside_graph(self.prepare, call, tokens, cache)
        else:
            self.prepare(call, tokens, cache)

    def prepare(self, call: ForwardCall, tokens: torch.Tensor, cache: Any) -> None:
        """Update record, frequencies and cached keys for the tokens of a forward."""
        past = 0 if cache is None else call.cached_tokens()
        shared = self._sharing_group() is not None
        new = token_positions(call, tokens, past, shared=shared, axes=self.axes)
        record = get_record(cache, past, new.shape[0], self.record_layout, self.patch_id)
        if record is None:
            if self.fixed_length is None and not self.method.fixed_at_admission:
                require_rerotatable_cache(cache, has_indexers=self.has_indexers)
            record = RotationRecord.empty(
                self.patch_id, empty_positions(cache, new), self.row_width, self.record_layout
            )
        record.append(past, new)
        if cache is not None:
            attach_record(cache, record)
        if torch.compiler.is_compiling():
            cached = list(self._cached_keys(cache, record, past))
            self._state.rows = torch.ops.rope_patch.update_rows(
                [keys for keys, _, _ in cached],
                [slots for _, slots, _ in cached],
                [list(self.slices).index(layer_type) for _, _, layer_type in cached],
                record.positions,
                new,
                record.row_spans,
                record.frequencies,
                self.op_handle,
            )
        else:
            counted = call.position_ids is None and isinstance(past, int)
            # A whole sequence without padding or gaps: its length needs no reading.
            plain = counted and past == 0 and call.attention_mask is None
            known_positions = self.generation_loop.take(call.position_ids)
            if counted:
                known_positions = [past] * len(new)
            elif self.position_rule is not None and self.position_rule.has_counted(
                call.position_ids
            ):
                # One behind each row's last; NaN where that has to be read.
                known_positions = (record.row_spans[:, 1] + 1).tolist()
            self._state.rows = self.update_rows(
                record.row_spans,
                record.frequencies,
                record.positions,
                new,
                lambda: self._cached_keys(cache, record, past),
                new.shape[1] if plain else None,
                known_positions,
            )
        self._state.pending_record = record if cache is None else None

    def after_decoder(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Attach the record to a cache that the decoder made (hook of the decoder)."""
        if self._state.pending_record is not None:
            cache = cache_in_output(output)
            if isinstance(cache, Cache):
                attach_record(cache, self._state.pending_record)
        self._state.rows = self._state.pending_record = None

    def before_rotary(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the frequencies of this forward (pre-hook of the rotary module)."""
        x, positions, layer_type = rotary_arguments(module, args, kwargs)
        if layer_type not in self.attribute_names:
            return
        rows = self._state.rows
        if rows is None:  # called outside the decoder: only its positions are known
            if self.axes is not None:
                positions = axis_positions(positions, self.axes)
            record = RotationRecord.empty(
                self.patch_id, positions, self.row_width, self.record_layout
            )
            rows = self.update_rows(
                record.row_spans, record.frequencies, positions, positions, lambda: ()
            )
        inv_freq, scale = self.frequency_table.per_layer_type(rows, layer_type, x.device)
        name, scale_name = self.attribute_names[layer_type]
        if torch.compiler.is_compiling():  # local to the graph: no lock
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
        """Restore the buffer that `before_rotary` replaced (hook of the rotary module).

        DistributedDataParallel writes the buffers of one process over those of the others, which
        may have rows of other lengths.
        """
        if self._state.saved_buffer is None:
            return
        name, original, is_locked = self._state.saved_buffer
        self._state.saved_buffer = None
        if torch.compiler.is_compiling():
            setattr(module, name, original)
            return
        module._buffers[name] = original
        if is_locked:
            self._lock.release()

    # -- frequencies of the rows -------------------------------------------------------------------

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
        """Update each row's frequencies and re-rotate its cached keys if they changed.

        Args:
            row_spans: See `RotationRecord`; updated in place.
            frequencies: See `RotationRecord`; updated in place.
            positions: Positions of all tokens, the new ones included, -1 for none, `[B, S]`, or
                `[B, S, A]` on several axes.
            new_positions: Positions of the new tokens alone.
            cached: Function that returns the keys cached so far.
            known_length: The rows' length in tokens, if it is known and the same for all.
            next_positions: Position of a single new token in each row, where it is known, the
                highest one of several axes; else it is read from `new_positions`.

        Returns:
            Frequencies and attention factors in float32 on the positions' device, `[B, F]`, or
            `[1, F]` where all rows have the same.
        """
        if (
            new_positions.shape[1] == 1
            and self.fixed_length is None
            and self._sharing_group() is None
        ):
            lowest = highest = next_positions
            if lowest is None or highest is None:
                lowest, highest = token_extents(new_positions)
            self.generation_loop.note_positions(highest)
            if not self.admission.is_new and extend_spans(row_spans, lowest, highest):
                return self._rows_on(row_spans[:, 2].tolist(), positions.device)
        if self.fixed_length is not None:
            row_spans[:, :2] = UNKNOWN
            valid_untils = [self.frequency_table.valid_until(self.fixed_length)] * len(row_spans)
        else:
            group = self._sharing_group()
            if known_length is not None and group is None:
                row_spans[:, 0], row_spans[:, 1] = 0, known_length - 1
            else:
                row_spans[:, :2] = first_and_last_positions(positions, group)
            lengths = [end - start + 1 for start, end, _ in row_spans.tolist()]
            if self.method.fixed_at_admission:
                lengths = self.admission.lengths_of_rows(lengths, row_spans[:, 2].tolist())
            valid_untils = list(map(self.frequency_table.valid_until, lengths))
        new_frequencies = torch.stack(list(map(self.frequency_table.row, valid_untils)))
        changed = (frequencies != new_frequencies).any(1)
        if changed.any():
            rerotated = changed & ~frequencies.isnan().any(1)
            if self.method.fixed_at_admission and rerotated.any():
                self.admission.require_draft(max(valid_untils))
            self._rerotate(cached(), frequencies, new_frequencies, rerotated)
            frequencies.copy_(new_frequencies)
        row_spans[:, 2] = torch.tensor(valid_untils, dtype=torch.float64, device="cpu")
        return self._rows_on(valid_untils, positions.device)

    def keeps_bits(self) -> bool:
        """Return whether some row of the present forward has the plain model's frequencies."""
        return any(map(self.frequency_table.is_plain, self._state.reaches))

    def _rows_on(self, reaches: list[float], device: torch.device) -> torch.Tensor:
        self._state.reaches = reaches
        return self.frequency_table.rows_on(reaches, device)

    def frequencies(self, length: float) -> dict[str | None, Frequencies]:
        """Return the frequencies of a sequence of `length` tokens, by layer type that changes."""
        return self.frequency_table.frequencies(length)

    def rows_of_forward(self) -> torch.Tensor | None:
        """Return the rows' frequencies in the decoder's present forward; None outside of it."""
        return self._state.rows

    def _sharing_group(self) -> Any:
        return self.group or context_parallel_group()

    def _cached_keys(self, cache: Any, record: RotationRecord, past: Any) -> Iterator[CachedKeys]:
        for index, keys, slots in self._keys_in_cache(cache, record, past):
            if index >= len(self.rotated_layer_types):
                raise Refused(
                    f"layer {index} of the cache belongs to none of the decoder's "
                    f"{len(self.rotated_layer_types)} layers of keys that are known, so its keys "
                    "cannot be rotated again: use a method whose frequencies stay, such as yarn, "
                    "or say the length beforehand (`handle.fix_length(...)`)"
                )
            if self.rotated_layer_types[index] in self.slices:
                yield keys, slots, self.rotated_layer_types[index]

    def _rerotate(
        self,
        cached: Iterable[CachedKeys],
        frequencies: torch.Tensor,
        new_frequencies: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        """Re-rotate cached keys; see `KeyRerotation.rerotate`."""
        start = self.method.start_token_count
        rerotation = KeyRerotation(self.slices, self.key_layout, self.kernels, start)
        rerotation.rerotate(cached, frequencies, new_frequencies, changed)

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("generation_loop", "admission", "_state", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_thread_state()
