"""Hooks on a decoder that follow the positions of each forward and of the tokens in its cache."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import torch
from torch import nn

from rope_patch.methods.position_map import PositionMap
from rope_patch.ops.modes import is_exporting
from rope_patch.patching.dynamic.cache_record import (
    attach_record,
    empty_positions,
    get_record,
)
from rope_patch.patching.dynamic.generation import position_map_refusal, require_no_paged_cache
from rope_patch.patching.position_maps.forward_view import ForwardView, PositionRecord
from rope_patch.patching.positions import context_parallel_group, token_positions
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import Cache, cache_in_output, self_attention_part
from rope_patch.transformers_api.forwards import ForwardCall
from rope_patch.utils.errors import Refused


class ForwardState(threading.local):
    """State of one forward, per thread.

    Attributes:
        view: What its attentions need to know; None outside of the decoder's forward.
        pending_record: The record of a cache that the decoder has yet to make.
        graph_positions: Positions of a compiled forward without a cache, `[B, S]` or `[1, S]`.
    """

    def __init__(self) -> None:
        self.graph_positions: torch.Tensor | None = None
        self.view: ForwardView | None = None
        self.pending_record: PositionRecord | None = None


class PositionHooks:
    """Hooks on one decoder that give its attentions the positions of queries and keys.

    Attributes:
        position_map: The map.
        reach: Positions that the frequencies below the map reach.
    """

    def __init__(self, position_map: PositionMap, reach: int, rotation_digest: str) -> None:
        self.position_map = position_map
        self.reach = reach
        self.layout = ("position map", rotation_digest)
        self.patch_id = uuid.uuid4().hex
        self._state = ForwardState()

    def attach(self, decoder: nn.Module, undo_log: UndoLog) -> None:
        """Install the hooks."""
        undo_log.hook(decoder, before=self.before_decoder, after=self.after_decoder)

    def before_decoder(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the positions of a forward (pre-hook of the decoder)."""
        if is_exporting():
            raise Refused(
                f"torch.export cannot hold {self.position_map}: which queries it maps depends on "
                "the positions of each call, and an exported program has no branches for that. Use "
                "torch.compile, or export the model with a method that changes frequencies alone, "
                "such as yarn"
            )
        if torch.compiler.is_compiling():
            from rope_patch.patching.position_maps.graph_operator import can_attend_in_graph

            self._state.graph_positions = None  # a forward that raised has left its own
            call = ForwardCall(decoder, args, kwargs)
            tokens, is_alone = call.tokens, not call.fills_cache(decoder)
            if tokens is not None and is_alone and can_attend_in_graph(decoder.config):
                self._state.graph_positions = token_positions(call, tokens, 0, shared=False)
                return
            # Imported here, because the module imports the compiler.
            from rope_patch.patching.dynamic.graph_break import call_outside_graph

            call_outside_graph(self.prepare, decoder, args, kwargs)
        else:
            self.prepare(decoder, args, kwargs)

    def prepare(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the positions of a forward's tokens, and view them beside those of its cache."""
        call = ForwardCall(decoder, args, kwargs)
        tokens, cache = call.tokens, call.cache
        if tokens is None:
            return  # the model raises an error of its own
        require_no_paged_cache(cache, position_map_refusal(self.position_map))
        if context_parallel_group() is not None:
            raise Refused(
                f"{self.position_map} compares each query with all keys of its sequence, and under "
                "context parallelism a process has a part of them: expected a method that changes "
                "frequencies alone, such as yarn"
            )
        past = int(call.cached_tokens())
        new = token_positions(call, tokens, past, shared=False)
        record: Any = get_record(cache, past, new.shape[0], self.layout, self.patch_id)
        if record is None:
            empty = empty_positions(cache, new)
            record = PositionRecord.empty(self.patch_id, empty, 0, self.layout)
        record.crop_turned(past)
        record.append(past, new)
        if cache is not None:
            attach_record(cache, record)
        self._state.pending_record = record if cache is None else None
        self._state.view = ForwardView(
            self.position_map,
            self.reach,
            new,
            record.positions,
            filled=past + new.shape[1],
            cache=cache,
            record=None if cache is None else record,
        )

    def accept_cache(self, cache: Any, positions: torch.Tensor | None) -> None:
        """Attach a record of the positions of a cache's tokens; see `Patch.accept_cache`."""
        cache = self_attention_part(cache)
        tokens = int(cache.get_seq_length())
        if not tokens:
            return  # an empty cache needs no record
        keys = next(each.keys for each in cache.layers if getattr(each, "keys", None) is not None)
        if positions is None:
            positions = torch.arange(tokens, device=keys.device).expand(keys.shape[0], tokens)
        if positions.shape != (keys.shape[0], tokens):
            raise Refused(
                f"positions must be those of {keys.shape[0]} rows of {tokens} tokens, got a tensor "
                f"of shape {list(positions.shape)}"
            )
        empty = empty_positions(cache, positions)
        record = PositionRecord.empty(self.patch_id, empty, 0, self.layout)
        record.append(0, positions)
        attach_record(cache, record)

    def after_decoder(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Attach the record to a cache that the decoder made (hook of the decoder)."""
        if torch.compiler.is_compiling():
            if self._state.graph_positions is not None:
                self._state.graph_positions = None
                return
            from rope_patch.patching.dynamic.graph_break import call_outside_graph

            call_outside_graph(self.finish, output)
        else:
            self.finish(output)

    def finish(self, output: Any) -> None:
        """Attach the record to the cache in a decoder's output, and forget the forward."""
        if self._state.pending_record is not None:
            cache = cache_in_output(output)
            if isinstance(cache, Cache):
                attach_record(cache, self._state.pending_record)
        self._state.view = self._state.pending_record = None

    @property
    def graph_positions(self) -> torch.Tensor | None:
        """Return the positions of a compiled forward that is one graph; None in all others."""
        return self._state.graph_positions

    def view_of(self, query: torch.Tensor, positions: torch.Tensor | None) -> ForwardView:
        """Return what an attention needs to know of its forward.

        Args:
            query: Its queries, `[B, H, Q, D]`.
            positions: `[B, Q]` or `[1, Q]`, if the attention was given them.

        Raises:
            ValueError: It runs outside its decoder's forward, without positions.
        """
        if self._state.view is not None:
            return self._state.view
        if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
            raise Refused(
                "an attention ran outside its decoder's forward, perhaps by gradient "
                "checkpointing, and was not given the positions that a position map depends on: "
                "switch gradient checkpointing off"
            )
        # Recomputed for a backward pass: without a cache, all keys are those of the queries.
        steps = positions.shape[1]
        return ForwardView(self.position_map, self.reach, positions, positions, filled=steps)

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = ForwardState()
