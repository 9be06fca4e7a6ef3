"""Rotation and the write of keys and values into a static cache, in one launch for a layer.

An attention's forward rotates and then updates its cache. During one forward, a stand-in takes the
cache's place: the rotation returns memory for queries and leaves keys as they are, and the update
launches the kernel that rotates both and writes keys and values where the update would.

That is right only if nothing reads queries or keys in between, and if the update is transformers'
own. `inspect_forward` proves the first from the forward's source: the update is the next statement
and the only use of the cache. `CacheWrite.of` checks the second in every forward.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from rope_patch.ops import qk_norm_rope, rope, rope_into_cache, use_triton
from rope_patch.transformers_api.caches import CACHE_FILE, Cache, StaticLayer

# transformers' own functions, read before anybody replaces them on the classes.
_CACHE_UPDATE = Cache.update
_LAYER_UPDATE = StaticLayer.update

_PLAIN_TYPES = frozenset((torch.Tensor, nn.Parameter))


def _is_own(function: Any) -> bool:
    """Return whether a function's code is from the file of transformers' caches."""
    return getattr(function, "__code__", None) is not None and (
        function.__code__.co_filename == CACHE_FILE
    )


@functools.cache
def _probe_update() -> bool:
    """Return whether a static layer's update is the one that `CacheWrite.update` replaces."""
    # The replaced update writes into the slots from `cumulative_length` on, counts the tokens there
    # in place, and returns all slots. Old releases of transformers take the slots from another
    # argument.
    if not (_is_own(_CACHE_UPDATE) and _is_own(_LAYER_UPDATE)):
        return False
    outside_of_modes = (_disable_current_modes(), torch.inference_mode(False), torch.no_grad())
    with ExitStack() as stack:
        for context in (*outside_of_modes, torch.device("cpu")):
            stack.enter_context(context)
        layer: Any = StaticLayer(max_cache_len=5)
        states = [torch.arange(1.0, 7).view(1, 2, 3, 1), torch.arange(7.0, 13).view(1, 2, 3, 1)]
        expected = [torch.zeros(1, 2, 5, 1) for _ in states]
        try:
            length = layer.cumulative_length
            for first, count in ((0, 2), (2, 1)):
                parts = [x[:, :, first : first + count] for x in states]
                for x, part in zip(expected, parts, strict=True):
                    x[:, :, first : first + count] = part
                got = layer.update(*parts, kwargs={})
                if got[0] is not layer.keys or got[1] is not layer.values:
                    return False
                if not all(x.equal(y) for x, y in zip(got, expected, strict=True)):
                    return False
                if layer.cumulative_length is not length or int(length) != first + count:
                    return False
        except (AttributeError, TypeError, ValueError, KeyError, RuntimeError):
            return False
    return True


class _Rotation(NamedTuple):
    """What a rotation was called with, and the memory for its queries."""

    q: torch.Tensor
    k: torch.Tensor
    positions: torch.Tensor
    packed_freqs: torch.Tensor
    norms: dict[str, Any]
    interleaved: bool
    kernels: str
    out: torch.Tensor


class CacheWrite:
    """Stand-in for a cache in one forward of an attention, which calls `update` alone.

    Attributes:
        cache: The cache.
        layer: Its layer for the attention.
        attention: The attention.
    """

    __slots__ = ("_rotation", "attention", "cache", "layer")

    def __init__(self, cache: Any, layer: Any, attention: nn.Module) -> None:
        self.cache = cache
        self.layer = layer
        self.attention = attention
        self._rotation: _Rotation | None = None

    @classmethod
    def of(cls, cache: Any, attention: Any) -> CacheWrite | None:
        """Return the stand-in for a cache, or None if its update is to stay as it is."""
        if (
            getattr(type(cache), "update", None) is not _CACHE_UPDATE
            or StaticLayer.update is not _LAYER_UPDATE
            or cache.offloading
            or "update" in vars(cache)
        ):
            return None
        index, layers = attention.layer_idx, cache.layers
        if type(index) is not int or not 0 <= index < len(layers):
            return None
        layer = layers[index]
        if type(layer) is not StaticLayer or "update" in vars(layer):
            return None
        return cls(cache, layer, attention) if _probe_update() else None

    def defer(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        packed_freqs: torch.Tensor,
        *,
        norms: dict[str, Any],
        interleaved: bool,
        heads_dim: int,
        kernels: str,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return memory for rotated queries, and keys as they are; None to rotate at once.

        Args:
            q: See `rope_patch.ops.rope`.
            k: See `rope_patch.ops.rope`.
            positions: See `rope_patch.ops.rope`.
            packed_freqs: See `rope_patch.ops.rope`.
            norms: The arguments of `rope_patch.ops.qk_norm_rope` that `rope` does not have.
            interleaved: See `rope_patch.ops.rope`.
            heads_dim: See `rope_patch.ops.rope`.
            kernels: See `rope_patch.ops.rope`.
        """
        if heads_dim != 1 or not self._fits(k, "keys") or not use_triton(q, kernels):
            return None
        out = torch.empty_like(q)
        self._rotation = _Rotation(q, k, positions, packed_freqs, norms, interleaved, kernels, out)
        return out, k

    def update(
        self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what the cache's update does, after the rotation if that is still to be done.

        Args:
            k: Keys.
            v: Values.
            layer_idx: The layer.
            options: Of the attention's forward, which paged caches read (transformers 5.24).
        """
        rotation, self._rotation = self._rotation, None
        if rotation is None:
            return self.cache.update(k, v, layer_idx, **options)
        q, _, positions, packed_freqs, norms, interleaved, kernels, out = rotation
        how: Any = {"interleaved": interleaved, "heads_dim": 1, "kernels": kernels, **norms}
        layer = self.layer
        if v.dtype != k.dtype or v.shape[:3] != k.shape[:3] or not self._fits(v, "values"):
            op: Any = qk_norm_rope if norms else rope
            rotated, k = op(q, k, positions=positions, packed_freqs=packed_freqs, **how)
            out.copy_(rotated)
            return self.cache.update(k, v, layer_idx, **options)
        if not layer.is_initialized:
            layer.lazy_initialization(k, v)
        rope_into_cache(
            q, k, v, layer.keys, layer.values, layer.cumulative_length, positions, packed_freqs,
            out=out, **how,
        )  # fmt: skip
        layer.cumulative_length.add_(k.shape[2])
        return layer.keys, layer.values

    def _fits(self, x: torch.Tensor, name: str) -> bool:
        """Return whether a layer's memory for `name` takes x as it is, or is still to be made."""
        layer = self.layer
        if not layer.is_initialized:
            return type(x) in _PLAIN_TYPES
        memory = getattr(layer, name)
        shape, size = x.shape, memory.shape
        return (
            type(memory) in _PLAIN_TYPES
            and memory.dtype == x.dtype
            and memory.device == x.device
            and layer.cumulative_length.device == x.device
            and not memory.requires_grad
            and shape[0] == size[0]
            and shape[1] == size[1]
            and shape[3] == size[3]
        )


class _Active(threading.local):
    """The stand-in of the forward that a thread runs."""

    write: CacheWrite | None = None


active = _Active()
