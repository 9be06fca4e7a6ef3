"""Prefill of prompts into a key-value cache that shares common prefixes."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from rope_patch.encodings.replacement.encoding import rotation_refusal
from rope_patch.patching import current
from rope_patch.transformers_api.caches import DynamicLayer, DynamicSlidingWindowLayer
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.utils.processes import free_memory

_CHUNK = 512  # tokens of a prefill chunk; whole chunks are shared
_MIN_CHUNK = 64
_FORCE_GROUPS = "TRANSFORMERS_SDPA_FORCE_GQA"  # transformers reads it at each call
_MAX_SNAPSHOTS = 16  # copies of sliding-window layers that are kept of a prompt


class PrefixReader:
    """Prefills one prompt after another and computes common prefixes once.

    Prompts are read in chunks on a fixed grid, and only whole chunks are shared. So each chunk is
    computed from the same numbers in the same shapes, whether its prefix was read for this prompt
    or for another one. Results are bit-identical with and without sharing, and after a killed run.

    With a length-dependent rotation, all of a prompt gets the frequencies of its last token, as in
    one pass, and only prompts of the same rotation share. Sliding-window layers drop old keys, so
    they are copied at some points of the grid, and sharing ends at such a point. Recurrent layers
    have a state that cannot be cropped: their models share nothing and read a prompt in one pass.

    Args:
        model: A transformers causal language model, patched or not.
        share: False reads each prompt from its start.
        chunk: Tokens read at once; halved when memory runs out.

    Attributes:
        all_see_all: Whether every layer's attention reaches back to the first token.
        rotates: Whether positions are told by rotation alone, so that `position_ids` say them.
        prompt_tokens: Tokens of all prompts so far.
        tokens_read: Tokens that went through the model for them.
    """

    def __init__(self, model: Any, share: bool = True, chunk: int | None = None) -> None:
        self.model = model
        self.handle = current(model)
        self.rotates = rotation_refusal(model) is None
        text = model.config.get_text_config(decoder=True)
        layer_classes = {type(layer) for layer in DynamicCache(config=text).layers}
        self.in_one_pass = not layer_classes <= {DynamicLayer, DynamicSlidingWindowLayer}
        self.all_see_all = layer_classes <= {DynamicLayer}
        # Re-rotation follows keys only through the cache's own operations.
        rerotates = self._reach_of(1) < math.inf
        self.has_windows = (
            DynamicSlidingWindowLayer in layer_classes and not self.in_one_pass and not rerotates
        )
        self.share = share and not self.in_one_pass
        self.chunk = _CHUNK if chunk is None else chunk
        self.prompt_tokens = 0
        self.tokens_read = 0
        self._prompt: list[int] = []
        self._reach = math.inf
        self._cache: Any = None
        self._window_snapshots: dict[int, list[Any]] = {}  # the cache's layers, by tokens read

    def __call__(
        self,
        ids: list[int],
        on_progress: Callable[[int], Any] = lambda tokens: None,
        length: int | None = None,
    ) -> Any:
        """Return a cache with the keys and values of all but the last token of a prompt.

        Args:
            ids: The prompt's tokens, at least one.
            on_progress: Called with the number of tokens that were read since the last call.
            length: Sequence length in tokens that the rotation follows; the prompt's unless given.

        Returns:
            A cache that the caller may extend until the next call.
        """
        self.prompt_tokens += len(ids)
        prefix, length = ids[:-1], len(ids) if length is None else length
        start = self._shared_tokens(prefix, self._reach_of(length))
        if start:
            if start < self._cache.get_seq_length():
                self._rewind(start)
        else:
            # Without a config, sliding-window layers keep all keys, and masks do the rest.
            config = None
            if self.in_one_pass or self.has_windows:
                config = self.model.config.get_text_config(decoder=True)
            self._cache, self._window_snapshots = DynamicCache(config=config), {}
        self._prompt = []  # an interrupted prefill must not be shared
        on_progress(start)
        size = max(len(prefix), 1) if self.in_one_pass else self.chunk
        every = -(-len(prefix) // self.chunk // _MAX_SNAPSHOTS) * self.chunk
        with self.fixed_length(length):
            while start < len(prefix):
                stop = min(start + size, len(prefix))
                self._prefill_chunk(prefix[start:stop])
                on_progress(stop - start)
                start = stop
                if self.has_windows and start % max(every, self.chunk) == 0:
                    self._window_snapshots[start] = [
                        copy.copy(layer) for layer in self._cache.layers
                    ]
        on_progress(1)
        self._prompt, self._reach = prefix, self._reach_of(length)
        return self._cache

    def borrow(self, cache: Any, tokens: int) -> Any:
        """Return a cache to read some more tokens with, until `give_back`.

        Args:
            cache: The cache of the prompt.
            tokens: How many more tokens.

        Returns:
            The cache itself, or a copy if cropping cannot restore it.
        """
        # Cropping cannot restore evicted sliding-window keys or re-rotated keys.
        rerotates = self._reach < cache.get_seq_length() + tokens
        return copy.deepcopy(cache) if self.in_one_pass or self.has_windows or rerotates else cache

    def give_back(self, cache: Any, borrowed: Any, tokens: int) -> None:
        """Restore a cache after `borrow`.

        Args:
            cache: The cache of the prompt.
            borrowed: What `borrow` returned.
            tokens: How many tokens were read with it.
        """
        if borrowed is cache:
            _drop_last_tokens(cache, tokens)

    def rotates_alike(self, lengths: Collection[int], end: int) -> bool:
        """Return whether prompts can be continued as rows of one batch, as far as is known.

        Args:
            lengths: Of the prompts, in tokens: those that rotations follow.
            end: Tokens of the longest one with its answer.

        Returns:
            Whether the cache keeps all keys, and one rotation holds for all lengths.
        """
        reaches = {self._reach_of(length) for length in lengths}
        kept = not self.in_one_pass and not self.has_windows
        return kept and len(reaches) == 1 and reaches.pop() >= end

    @contextlib.contextmanager
    def fixed_length(self, length: int) -> Iterator[None]:
        """Rotate as sequences of a length do, until the end of the block."""
        if self.handle is not None:
            self.handle.fix_length(length)
        try:
            yield
        finally:
            if self.handle is not None:
                self.handle.fix_length(None)

    def halve_chunk(self) -> bool:
        """Free memory and halve the chunk; return False if it is already the smallest."""
        self.clear()
        if self.in_one_pass or self.chunk <= _MIN_CHUNK:
            return False
        self.chunk //= 2
        return True

    def clear(self) -> None:
        """Drop the cache and free its memory."""
        self._cache, self._prompt, self._window_snapshots = None, [], {}
        free_memory()

    def _shared_tokens(self, ids: list[int], reach: float) -> int:
        """Return how many tokens of a prompt the cache holds, in whole chunks."""
        # Cached keys have the rotation of a prompt only where both have the same reach.
        if not self.share or not self._prompt or reach != self._reach:
            return 0
        if self._reach < self._cache.get_seq_length():
            return 0  # re-rotated while the answer was generated
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
        """Crop the cache to some tokens."""
        if not self.has_windows:
            _drop_last_tokens(self._cache, self._cache.get_seq_length() - length)
            return
        # Layers replace their tensors and never write into them, so a shallow copy is enough.
        self._cache.layers[:] = [copy.copy(layer) for layer in self._window_snapshots[length]]
        self._window_snapshots = {
            mark: layers for mark, layers in self._window_snapshots.items() if mark <= length
        }

    def _reach_of(self, length: int) -> float:
        """Return the length up to which sequences have the same rotation as one of `length`."""
        if self.handle is None:
            return math.inf
        return self.handle.method.valid_until(length, self.handle.trained_length)

    def _prefill_chunk(self, ids: list[int]) -> None:
        tokens = torch.tensor([ids], device=input_device(self.model))
        with torch.no_grad(), _grouped_heads(tokens.device):
            self.model(
                tokens, **cache_arguments(self.model, self._cache), use_cache=True, logits_to_keep=1
            )
        self.tokens_read += len(ids)


@contextlib.contextmanager
def _grouped_heads(device: torch.device) -> Iterator[None]:
    """Make torch's attention on a CPU share keys and values between query heads."""
    if device.type != "cpu" or _FORCE_GROUPS in os.environ:
        yield
        return
    # With a mask, which every chunk after the first one has, transformers repeats all keys and
    # values for each query head, which takes time and memory. The results are the same bits.
    os.environ[_FORCE_GROUPS] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCE_GROUPS]


def input_device(model: Any) -> torch.device:
    """Return the device of a model's input."""
    device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device  # offloaded: hooks move it


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or in the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _drop_last_tokens(cache: Any, tokens: int) -> None:
    """Crop the last tokens of a cache."""
    if tokens > 0:
        cache.crop(-tokens)
