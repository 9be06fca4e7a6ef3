"""Lengths at which generate admits sequences, for methods that fix the factor at admission.

generate says beforehand how long each sequence may become: its prompt and `max_new_tokens`. The
frequencies of that length rotate the sequence from its first token on, so no cached key is ever
re-rotated. Outside of generate a sequence is admitted with what its first forward holds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rope_patch.patching.dynamic.cache_record import cached_positions
from rope_patch.patching.dynamic.generation_loop import WrappedMethod
from rope_patch.patching.dynamic.sequence_lengths import first_and_last_positions
from rope_patch.patching.positions import prompt_positions
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import cache_among
from rope_patch.transformers_api.generation import (
    GENERATE,
    PREPARE_CACHE,
    PREPARE_LENGTH,
    generating_modules,
)
from rope_patch.utils.errors import Refused


class Admission(threading.local):
    """Lengths that the present generate of this thread asks for.

    Attributes:
        lengths: Tokens of each row with all that may be generated; None outside of generate.
        prompt: Tokens of the prompt in its longest row, and its device.
        new_tokens: How many tokens may be generated.
        is_draft: Whether an assistant generates a draft, whose cache no request announces.
        is_new: Whether the lengths have yet to be compared with those that the cache serves.
    """

    def __init__(self) -> None:
        self.lengths: list[float] | None = None
        self.prompt = (0, torch.device("cpu"))
        self.new_tokens = 0
        self.is_draft = self.is_new = False

    @contextmanager
    def generate(self) -> Iterator[None]:
        """Keep the lengths of an outer generate for after this one."""
        outer = dict(vars(self))
        try:
            yield
        finally:
            vars(self).update(outer)

    def admit(self, model_kwargs: dict[str, Any], is_draft: bool) -> None:
        """Note the lengths of a generate's rows.

        Args:
            model_kwargs: The generate's arguments for the model, with those that it made.
            is_draft: Whether the tokens are a draft of assisted decoding.
        """
        if is_draft and self.lengths is not None:
            return  # early exit drafts for the outer generate's rows
        cached = cached_positions(cache_among(model_kwargs))
        positions, last = prompt_positions(model_kwargs, cached, *self.prompt)
        spans = first_and_last_positions(positions).tolist()
        self.lengths = [
            max(largest, end + self.new_tokens) - first + 1
            for (first, largest), end in zip(spans, last, strict=True)
        ]
        self.is_draft, self.is_new = is_draft, True

    def lengths_of_rows(self, lengths: list[float], reaches: list[float]) -> list[float]:
        """Return the lengths whose frequencies rows get.

        Args:
            lengths: Tokens of each row so far.
            reaches: The length that each row's present frequencies serve; NaN if it has none.
        """
        self.is_new = False
        admitted = self.lengths or [0.0]
        if len(admitted) != len(lengths):  # one for all, or rows that generate does not count
            admitted = [max(admitted)] * len(lengths)
        needs = list(map(max, lengths, admitted))
        return [
            reach if need <= reach else need  # False for NaN
            for need, reach in zip(needs, reaches, strict=True)
        ]

    def require_draft(self, need: float) -> None:
        """Raise unless cached keys may be re-rotated, which only those of a draft may.

        Args:
            need: The length that the frequencies must serve.

        Raises:
            ValueError: The keys are a sequence's own. The message says what to do instead.
        """
        if self.is_draft:
            return
        raise Refused(
            "with growth='admission' a sequence keeps the factor that its cache began with, and "
            f"this one asks for the factor of {math.floor(need):,} tokens: expected a sequence "
            "that stays within the length it was admitted with. Say the whole length before its "
            "first token (`handle.fix_length(...)`), or read the text again into a new cache, or "
            "use growth='stepped', which rotates cached keys again"
        )


def watch_admission(
    model: nn.Module, length_hooks: list[tuple[nn.Module, Any, Any]], undo_log: UndoLog
) -> None:
    """Report the lengths that a model's generate asks for to `LengthHooks` that fix them.

    Args:
        model: The patched model, or a wrapper of it.
        length_hooks: Each decoder that follows lengths, its rotary module and its `LengthHooks`.
        undo_log: Log of the changes.
    """
    for decoder, _, hooks in length_hooks:
        if not hooks.method.fixed_at_admission:
            continue
        wrappers: dict[str, type[WrappedMethod]] = {
            GENERATE: _Generate,
            PREPARE_LENGTH: _PrepareLength,
            PREPARE_CACHE: _PrepareCache,
        }
        for module in generating_modules(model, decoder, *wrappers):
            for name, wrapper in wrappers.items():
                undo_log.set(module, name, wrapper(getattr(module, name), hooks))


class _Generate(WrappedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.hooks.admission.generate():
            return self.original_method(*args, **kwargs)


class _PrepareLength(WrappedMethod):
    def __call__(self, **kwargs: Any) -> Any:
        config, admission = self.original_method(**kwargs), self.hooks.admission
        ids, inputs = kwargs["input_ids_length"], kwargs["inputs_tensor"]
        admission.prompt = (max(ids, inputs.shape[1]), inputs.device)
        admission.new_tokens = config.max_length - ids
        return config


class _PrepareCache(WrappedMethod):
    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = self.original_method(generation_config, model_kwargs, *args, **kwargs)
        self.hooks.admission.admit(model_kwargs, bool(generation_config.is_assistant))
        return result
