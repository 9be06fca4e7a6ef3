"""Warn that a text outgrew the patched length, and read texts again whose cache was dropped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.architecture.rotary_traits import AXES
from rope_patch.patching.dynamic.generation import WrappedMethod
from rope_patch.patching.plan import PatchPlan
from rope_patch.patching.positions import counted_positions
from rope_patch.patching.stamp import innermost_decoders
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import is_paged, known_length
from rope_patch.transformers_api.forwards import TOKENS, ForwardCall, cache_among
from rope_patch.transformers_api.generation import (
    PREPARE_INPUTS,
    drops_cache_alone,
    whole_text_arguments,
)

logger = logging.getLogger("rope_patch")

_is_silent: ContextVar[bool] = ContextVar("length_warnings_are_silent", default=False)
# The longest patched length, in tokens, that each decoder has warned of.
_warned_lengths: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@contextlib.contextmanager
def silence_length_warnings() -> Iterator[None]:
    """Let texts outgrow patched lengths without a warning, where such lengths are measured."""
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


class LengthWarning:
    """Pre-hook of decoders that warns once when a position lies beyond the patched length.

    The shapes of tokens and cache tell without reading from a device that a sequence is short
    enough. Only beyond the length, positions are read, because padded and packed rows are longer
    than their sequences. Another patch of the model warns again only if its length is larger.
    Compiled graphs do not warn, and a process that holds a part of a sequence (context parallelism)
    counts that part alone.

    Attributes:
        length: The patched length in tokens.
        method: The method, for the message.
    """

    def __init__(self, length: int, method: str) -> None:
        self.length = length
        self.method = method
        self._has_warned = False

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._has_warned or _is_silent.get():
            return
        longest = outgrown_length(decoder, args, kwargs, self.length)
        if longest is None:
            return
        self._has_warned = True
        if _warned_lengths.get(decoder, 0) >= self.length:
            return
        _warned_lengths[decoder] = self.length
        logger.warning(
            "a text of %s tokens outgrew the %s that the model is patched for by %s, which "
            "stretches no further: expect worse answers from here. Patch the model again with a "
            "larger length=..., or by a method that follows the length, such as dynamic-yarn. "
            "This is said once.",
            f"{longest:,}",
            f"{self.length:,}",
            self.method,
        )


def make_length_warning(plan: PatchPlan) -> LengthWarning | None:
    """Return the warning of a patch; None if its method has no longest length."""
    if plan.length is None or plan.is_dynamic:
        return None
    if plan.position_map is not None and plan.longest_mapped_text is None:
        return None  # the length is the largest one expected, and no limit
    if not any((f.inv_freq > 0).any() for f in plan.frequencies().values()):
        return None  # nothing rotates (`nope`)
    return LengthWarning(plan.length, str(plan.method))


def install_length_warning(
    warning: LengthWarning, model: nn.Module, rotaries: list[RotaryModule], undo_log: UndoLog
) -> None:
    """Have a model's decoders warn of texts that are too long.

    Args:
        warning: The warning, shared by all decoders.
        model: The model.
        rotaries: Its rotary modules.
        undo_log: Log of the changes.
    """
    for decoder in innermost_decoders(model, rotaries):
        undo_log.hook(decoder, before=warning)


def outgrown_length(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> int | None:
    """Return the tokens of a forward's longest sequence if it is longer than `length`, else None.

    Reads from a device only if the shapes leave it open.
    """
    call = ForwardCall(decoder, args, kwargs)
    if _upper_bound(call) <= length:
        return None
    longest = _longest_sequence(call)
    return longest if longest > length else None


def _upper_bound(call: ForwardCall) -> int:
    """Return a number of tokens that no sequence of a forward exceeds, from shapes alone."""
    tokens, cache = call.tokens, call.cache
    if tokens is None or not _is_readable(tokens):
        return 0
    past = 0 if cache is None else known_length(cache)
    if past is None:  # counted on a device (static), or not at all (paged)
        past = getattr(cache, "max_cache_len", 0)
    return past + int(tokens.shape[1])


def _longest_sequence(call: ForwardCall) -> int:
    """Return the tokens of a forward's longest sequence, the cached ones included."""
    positions = call.position_ids
    if positions is not None:
        if positions.ndim == 3 and positions.shape[0] > AXES:
            positions = positions[1:]  # M-RoPE: the first are for the mask of packed rows
        is_known = positions.numel() and _is_readable(positions)
        return int(positions.max()) + 1 if is_known else 0
    counted = counted_positions(call)
    if counted is not None and counted.numel() and _is_readable(counted):
        return int(counted.max()) + 1
    past = 0 if is_paged(call.cache) else call.cached_tokens()
    if isinstance(past, torch.Tensor) and not _is_readable(past):
        return 0
    tokens = call.tokens
    return 0 if tokens is None else int(past) + int(tokens.shape[1])


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values, and reading them disturbs no capture of a CUDA graph."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def read_dropped_texts_again(model: nn.Module, undo_log: UndoLog) -> None:
    """Give a model's forward the whole text wherever its generate drops the cache.

    Phi-3 and its kin drop the cached keys in `generate` where a text passes the config's original
    length. Up to transformers 5.17 they still pass on the newest token or its place alone, so the
    model goes on as if nothing stood before it, with or without a patch. A patched model is given
    the whole text there, as transformers does from 5.23 on.

    Args:
        model: The patched model, or a wrapper of it.
        undo_log: Log of the changes.
    """
    for module in model.modules():
        if drops_cache_alone(module):
            wrapped = _PrepareInputs(getattr(module, PREPARE_INPUTS), None)
            undo_log.set(module, PREPARE_INPUTS, wrapped)


class _PrepareInputs(WrappedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = self.original_method(*args, **kwargs)
        cache = cache_among(kwargs)
        if cache is None or cache_among(inputs) is not None or cache.get_seq_length() == 0:
            return inputs
        whole = args[0] if args else kwargs[TOKENS]
        return dict(self.original_method(*args, **kwargs | whole_text_arguments(whole)))
