"""Classes of key-value caches and of their layers, and the cache in a forward's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from rope_patch.transformers_api.models import installed_release
from rope_patch.utils.errors import Refused

__all__ = [
    "CACHE_FILE",
    "INDEXED_LAYERS",
    "REROTATABLE_LAYERS",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "cache_in_output",
    "is_cache",
    "is_cache_class",
    "is_paged",
    "known_length",
    "layer_classes",
    "require_counted_cache",
    "self_attention_part",
    "start_layer",
]

_BATCHING = "transformers.generation.continuous_batching"
# Most arguments of forwards. Dynamo cannot ask all classes for their module.
_NO_CACHES = (torch.Tensor, bool, int, float, str, dict, list, tuple)

CACHE_FILE = cache_utils.__file__  # where transformers' own `update` methods come from


def _existing(*names: str) -> tuple[type, ...]:
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


# Layers whose `keys` hold one rotated key for each slot. The hybrid ones have the state of a linear
# attention beside them; transformers 5.0 has the first two alone.
REROTATABLE_LAYERS: tuple[type, ...] = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    *_existing(
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer",
        "LinearAttentionAndStaticSlidingWindowAttentionLayer",
    ),
)

# Layers that also hold the keys of an indexer (sparse attention); transformers 5.0 has none.
INDEXED_LAYERS: tuple[type, ...] = _existing("DynamicIndexedLayer", "StaticIndexedLayer")


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache: by its class, or because it has a cache's methods.

    Some models of transformers 5.0 to 5.3 have caches without the common base class, such as those
    of hybrid state-space models. All count their tokens and are updated layer by layer. A paged
    cache (continuous batching) has no base class and does not count.
    """
    if value is None or isinstance(value, _NO_CACHES):
        return False
    return isinstance(value, Cache) or _has_methods(value) or is_paged(value)


def is_cache_class(value_class: type) -> bool:
    """Return whether a class is one of caches, as `is_cache` is of values."""
    return (
        issubclass(value_class, Cache)
        or _has_methods(value_class)
        or value_class.__module__.startswith(_BATCHING)
    )


def is_paged(value: Any) -> bool:
    """Return whether a value is the cache of continuous batching."""
    return type(value).__module__.startswith(_BATCHING)


def self_attention_part(cache: Any) -> Any:
    """Return the part of an encoder-decoder's cache that holds its own keys; others as they are."""
    return getattr(cache, "self_attention_cache", cache)


def require_counted_cache(cache: Any) -> None:
    """Raise if a cache does not count its tokens, as all of transformers' but the paged one do.

    Raises:
        ValueError: It does not.
    """
    if cache is not None and not hasattr(cache, "get_seq_length"):
        raise Refused(
            f"a {type(cache).__name__} does not say how many tokens it holds, in "
            f"{installed_release()}: expected a cache of transformers, such as DynamicCache"
        )


def known_length(cache: Any) -> int | None:
    """Return how many tokens a cache holds; None if it does not count, or on another device."""
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
    if isinstance(length, torch.Tensor):
        return int(length) if length.device.type == "cpu" else None
    return length


def cache_in_output(output: Any) -> Any:
    """Return the self-attention cache in a decoder's output, or None.

    An output is a tuple, or a mapping in which the cache is `past_key_values` up to transformers
    5.23 and `cache` from 5.24 on: the value that is a cache is taken.
    """
    parts = output if isinstance(output, tuple | list) else _values(output)
    for part in parts:
        if is_cache(part) and not is_paged(part):
            return self_attention_part(part)
    return None


def layer_classes(cache: Any) -> list[type]:
    """Return the classes of a cache's layers; of those it will have, where it has none yet."""
    if cache is None:
        return []
    layers = cache.layers or [cache.layer_class_to_replicate]
    return [layer if isinstance(layer, type) else type(layer) for layer in layers]


def start_layer(layer: Any, like: Any) -> None:
    """Give a layer of one's own the attributes that its first update would set.

    A layer has one `dtype` up to transformers 5.23; from 5.24 on its keys and values have theirs.

    Args:
        layer: The layer.
        like: A layer with keys and values of the same kind.
    """
    layer.device, layer.is_initialized = like.keys.device, True
    if hasattr(like, "dtype"):
        layer.dtype = like.dtype


def _has_methods(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _values(output: Any) -> Iterator[Any]:
    if hasattr(output, "values"):
        return iter(output.values())
    return iter(vars(output).values()) if hasattr(output, "__dict__") else iter(())
