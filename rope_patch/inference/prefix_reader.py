"""Prompts read into a key-value cache, each from where it parts from the one before."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rope_patch.patching import current

_CHUNK, _CPU_CHUNK = 2048, 512  # tokens of a prompt that are read at once
_MIN_CHUNK = 64
_MAX_SNAPSHOTS = 16  # places of a prompt that layers with a window can be brought back to


class PrefixReader:
    """Reads prompts one after another, and what they begin with in common once.

    Prompts are read in chunks on a fixed grid, and only whole chunks are shared. So every chunk is
    computed from the same numbers in the same shapes whether its predecessors were read for this
    prompt or for another one: results are the same to the bit with and without sharing, and after a
    run was killed.

    Where the rotation follows the length, all of a prompt is rotated as its last token asks for, as
    if it were read in one pass, and only prompts of the same rotation share. Layers with a window
    keep no more than it holds, so their keys are remembered at some places on the grid, which is
    where sharing ends. Models whose layers keep more than keys and values (recurrent ones) share
    nothing, since their state cannot be cut back, and read a prompt in one pass.

    Args:
        model: A transformers causal language model, patched or not.
        share: False reads every prompt from its start.
        chunk: Tokens read at once; halved where memory runs out.

    Attributes:
        prompt_tokens: Tokens of all prompts so far.
        tokens_read: Tokens that went through the model for them.
    """

    def __init__(self, model: Any, share: bool = True, chunk: int | None = None) -> None:
        self.model = model
        self.handle = current(model)
        kinds = {type(layer) for layer in DynamicCache(config=_text_config(model)).layers}
        self.in_one_pass = not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        # Keys that turn are followed through the cache's own operations only.
        turns = self._reach_of(1) < math.inf
        self.has_windows = DynamicSlidingWindowLayer in kinds and not self.in_one_pass and not turns
        self.share = share and not self.in_one_pass
        self.chunk = chunk or (_CPU_CHUNK if input_device(model).type == "cpu" else _CHUNK)
        self.prompt_tokens = 0
        self.tokens_read = 0
        self._prompt: list[int] = []
        self._reach = math.inf
        self._cache: Any = None
        self._window_snapshots: dict[
            int, list[Any]
        ] = {}  # by tokens read: the layers with a window

    def __call__(
        self,
        ids: list[int],
        on_progress: Callable[[int], Any] = lambda tokens: None,
        length: int | None = None,
    ) -> Any:
        """A cache with the keys and values of all but the last token of a prompt.

        Args:
            ids: The prompt's tokens, at least one.
            on_progress: Told how many tokens of the prompt are done, whenever some are.
            length: Tokens of the sequence that the rotation follows; the prompt's unless given.

        Returns:
            A cache that the caller may extend until the next call.
        """
        self.prompt_tokens += len(ids)
        wanted, length = ids[:-1], length or len(ids)
        start = self._shared_tokens(wanted, self._reach_of(length))
        if start:
            if start < self._cache.get_seq_length():
                self._rewind(start)
        else:
            # Without a config, layers with a window keep all keys too, and masks do the rest.
            config = _text_config(self.model) if self.in_one_pass or self.has_windows else None
            self._cache, self._window_snapshots = DynamicCache(config=config), {}
        self._prompt = []  # until all is read
        on_progress(start)
        size = max(len(wanted), 1) if self.in_one_pass else self.chunk
        every = -(-len(wanted) // self.chunk // _MAX_SNAPSHOTS) * self.chunk
        if self.handle is not None:
            self.handle.fix_length(length)
        try:
            while start < len(wanted):
                stop = min(start + size, len(wanted))
                self._prefill_chunk(wanted[start:stop])
                on_progress(stop - start)
                start = stop
                if self.has_windows and start % max(every, self.chunk) == 0:
                    self._window_snapshots[start] = [
                        copy.copy(layer) for layer in self._cache.layers
                    ]
        finally:
            if self.handle is not None:
                self.handle.fix_length(None)
        on_progress(1)
        self._prompt, self._reach = wanted, self._reach_of(length)
        return self._cache

    def borrow(self, cache: Any, tokens: int) -> Any:
        """The cache to read so many more tokens with, which `give_back` takes out of it again."""
        # What left a window cannot be brought back by cutting, nor keys that turned meanwhile.
        turns = self._reach < cache.get_seq_length() + tokens
        return copy.deepcopy(cache) if self.in_one_pass or self.has_windows or turns else cache

    def give_back(self, cache: Any, scratch: Any, tokens: int) -> None:
        """Brings a cache back to what it was before so many tokens were read with its scratch."""
        if scratch is cache:
            _drop_last_tokens(cache, tokens)

    def halve_chunk(self) -> bool:
        """Frees memory and halves the chunk; False where it is as small as it gets."""
        self.clear()
        if self.in_one_pass or self.chunk <= _MIN_CHUNK:
            return False
        self.chunk //= 2
        return True

    def clear(self) -> None:
        """Forgets what was read, and frees its memory."""
        self._cache, self._prompt, self._window_snapshots = None, [], {}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _shared_tokens(self, ids: list[int], reach: float) -> int:
        """How many tokens the cache holds of a prompt's, in whole chunks, rotated as it asks."""
        if not self.share or not self._prompt or reach != self._reach:
            return 0
        if self._reach < self._cache.get_seq_length():
            return 0  # turned while the answer was written
        if ids == self._prompt and (
            not self.has_windows or self._cache.get_seq_length() == len(ids)
        ):
            return len(ids)
        same = 0
        for old, new in zip(self._prompt, ids, strict=False):
            if old != new:
                break
            same += 1
        if self.has_windows:
            return max((mark for mark in self._window_snapshots if mark <= same), default=0)
        return same // self.chunk * self.chunk

    def _rewind(self, length: int) -> None:
        """Leaves so many tokens in the cache."""
        if not self.has_windows:
            _drop_last_tokens(self._cache, self._cache.get_seq_length() - length)
            return
        # Layers put new tensors in the place of old ones, so a copy of a layer keeps its own.
        self._cache.layers[:] = [copy.copy(layer) for layer in self._window_snapshots[length]]
        self._window_snapshots = {
            mark: kept for mark, kept in self._window_snapshots.items() if mark <= length
        }

    def _reach_of(self, length: int) -> float:
        """Up to which length in tokens sequences are rotated as one of `length` is."""
        if self.handle is None:
            return math.inf
        return self.handle.method.valid_until(length, self.handle.trained_length)

    def _prefill_chunk(self, ids: list[int]) -> None:
        tokens = torch.tensor([ids], device=input_device(self.model))
        with torch.no_grad():
            self.model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self.tokens_read += len(ids)


def input_device(model: Any) -> torch.device:
    """Where a model's input goes."""
    found = model.get_input_embeddings().weight.device
    return torch.device("cpu") if found.type == "meta" else found  # offloaded: hooks move it


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or in the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _drop_last_tokens(cache: Any, tokens: int) -> None:
    """Takes the last tokens out of a cache."""
    if tokens > 0:
        cache.crop(-tokens)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
