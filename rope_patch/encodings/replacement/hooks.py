"""Hooks that give a decoder its encoding: on the decoder, its first layer and its attentions.

A bias enters through `attention_mask` under eager attention and SDPA, whose masks are numbers that
are added to logits. Flex attention has a block mask there, so it gets `position_bias`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.encodings.replacement.encoding import AbsoluteEncoding, BiasEncoding, Encoding, Span
from rope_patch.transformers_api.attention_functions import has_causality
from rope_patch.transformers_api.caches import is_paged, require_counted_cache
from rope_patch.transformers_api.forwards import (
    CACHE_OFFSET,
    MASK,
    POSITIONS,
    cache_among,
    hidden_states,
    with_hidden_states,
)
from rope_patch.transformers_api.models import attention_implementation
from rope_patch.utils.errors import Refused

BY_MASK = ("eager", "sdpa")
BY_BIAS = ("flex_attention",)
_ROTATION = "position_embeddings"
_TAKES_POSITIONS: dict[Any, bool] = {}  # whether a class of caches takes positions


class SharedTensors:
    """What a forward of a decoder has computed for one layer and the others use, too, by thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def entries(self) -> dict[Any, tuple[Any, Any]]:
        """Return masks with their bias, and rotations by angle 0, beside what was given, by its id.

        What was given is kept, because its id would else be that of another tensor later.
        """
        if not hasattr(self._local, "entries"):
            self._local.entries = {}
        return self._local.entries

    def no_rotation(
        self, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of angle 0, in the shape of those given."""
        if torch.compiler.is_compiling():
            return torch.ones_like(cosines), torch.zeros_like(sines)
        if id(cosines) not in self.entries:
            still = torch.ones_like(cosines), torch.zeros_like(sines)
            self.entries[id(cosines)] = cosines, still
        return self.entries[id(cosines)][1]

    def forget(self, *_: Any) -> None:
        """Forget everything (hook before and after the decoder)."""
        self.entries.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._local = threading.local()


class AttentionHook:
    """Pre-hook of an attention: switches its rotation off, and adds the bias.

    Attributes:
        encoding: The decoder's encoding.
        layer: The layer around the attention.
        index: The layer's index.
        shared: What the layers of the present forward share.
    """

    def __init__(self, encoding: Encoding, layer: nn.Module, index: int, shared: SharedTensors):
        self.encoding = encoding
        self.layer = layer
        self.index = index
        self.shared = shared

    def __call__(
        self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        implementation = attention_implementation(attention.config)
        hidden = hidden_states(attention, args, kwargs)
        kwargs = dict(kwargs)
        rotation = kwargs.get(_ROTATION)
        # A layer without rotation of its own is given None (BEAM).
        if rotation is not None and not self.encoding.rotates(self.index):
            if not isinstance(rotation, tuple) or len(rotation) != 2:
                raise Refused(
                    f"{type(attention).__name__} is given its rotation as a "
                    f"{type(rotation).__name__}, expected cos and sin, which the encoding "
                    f"{self.encoding.name!r} switches off: use a decoder of Llama's kind"
                )
            kwargs[_ROTATION] = self.shared.no_rotation(*rotation)
        if isinstance(self.encoding, BiasEncoding):
            require_implementation(self.encoding, implementation)
            if implementation in BY_BIAS:
                kwargs["position_bias"] = self._position_bias(attention, hidden, kwargs)
            else:
                self._require_causality(attention, implementation, kwargs)
                kwargs[MASK] = self._mask(attention, hidden, kwargs)
        return args, kwargs

    def _require_causality(
        self, attention: Any, implementation: str, kwargs: dict[str, Any]
    ) -> None:
        """Raise if queries see all keys, as they do in eager attention without a mask."""
        if kwargs.get(MASK) is None and (
            implementation == "eager" or not has_causality(attention, kwargs)
        ):
            raise Refused(
                f"{type(attention).__name__} attends to later tokens (is_causal is False), for "
                f"which the encoding {self.encoding.name!r} has no distance: expected attention to "
                "earlier tokens alone"
            )

    def _mask(self, attention: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the mask of a call with the bias in it, `[B or 1, H, Q, K]`."""
        given: Any = kwargs.get(MASK)

        def compute(span: Span) -> torch.Tensor:
            mask = span.keys <= span.queries[:, None] if given is None else given
            if mask.shape[-1] != len(span.keys):
                raise Refused(
                    f"{type(attention).__name__} is given a mask of {mask.shape[-1]} keys, and "
                    f"its part of the cache will hold {len(span.keys)}: the encoding "
                    f"{self.encoding.name!r} needs the place of every key"
                )
            return biased_mask(mask, self.encoding(span), _logits_dtype(hidden))

        return self._shared(attention, hidden, kwargs, given, compute)

    def _position_bias(
        self, attention: Any, hidden: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the bias for flex attention, which reads `[B, H, Q, K]` without broadcasting."""

        def compute(span: Span) -> torch.Tensor:
            bias = self.encoding(span).to(_logits_dtype(hidden))
            return bias.expand(len(hidden), -1, -1, -1)

        # The bias is added beside the block mask, which tells padding from tokens.
        return self._shared(attention, hidden, kwargs, kwargs.get(MASK), compute)

    def _shared(
        self,
        attention: Any,
        hidden: torch.Tensor,
        kwargs: dict[str, Any],
        mask: Any,
        compute: Callable[[Span], torch.Tensor],
    ) -> torch.Tensor:
        slots, positions = Slots.of(attention, hidden, kwargs), kwargs.get(POSITIONS)
        # A checkpointed layer runs again alone in the backward pass, and must compute the same.
        alone = self.layer.training and getattr(self.layer, "gradient_checkpointing", False)
        # Where the first key is a tensor, its number could not be compared without waiting for it.
        if alone or isinstance(slots.first_key, torch.Tensor) or torch.compiler.is_compiling():
            return compute(slots.span(hidden.device, positions, mask))
        shape = (slots.queries, slots.keys, slots.first_key)
        key = (*shape, id(mask), id(positions), hidden.device)
        entries = self.shared.entries
        if key not in entries:
            entries[key] = (
                (mask, positions),
                compute(slots.span(hidden.device, positions, mask)),
            )
        return entries[key][1]


class TableHook:
    """Pre-hook of a decoder's first layer: adds the encoding to embeddings.

    Attributes:
        encoding: The decoder's encoding.
    """

    def __init__(self, encoding: AbsoluteEncoding) -> None:
        self.encoding = encoding

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions = kwargs.get(POSITIONS)
        if positions is None:
            raise Refused(
                f"{type(layer).__name__} was given no position_ids, which the encoding "
                f"{self.encoding.name!r} adds vectors for"
            )
        hidden = hidden_states(layer, args, kwargs)
        if hidden.ndim != 3:
            raise Refused(
                f"{type(layer).__name__} reads hidden states of {hidden.ndim} dimensions, several "
                f"streams for each token, and the encoding {self.encoding.name!r} adds to "
                "embeddings, of 3: expected a decoder of Llama's kind"
            )
        if not torch.compiler.is_compiling():
            # A paged cache has no slots of one sequence, so positions are read (batching).
            is_batching = is_paged(cache_among(kwargs))
            slots = None if is_batching else Slots.of(layer.self_attn, hidden, kwargs).end
            self.encoding.require_known(positions, slots)
        return with_hidden_states(layer, args, kwargs, self._added(hidden, positions))

    def _added(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return hidden + self.encoding(positions.to(hidden.device)).to(hidden.dtype)


def require_implementation(encoding: Encoding, implementation: str) -> None:
    """Raise if an attention implementation takes no bias.

    Raises:
        ValueError: The implementation is none of eager, SDPA and flex attention.
    """
    if isinstance(encoding, BiasEncoding) and implementation not in (*BY_MASK, *BY_BIAS):
        raise Refused(
            f"the attention implementation {implementation!r} takes no bias on its logits, which "
            f"the encoding {encoding.name!r} is: expected {', '.join((*BY_MASK, *BY_BIAS))} "
            "(model.set_attn_implementation('sdpa'))"
        )


def biased_mask(mask: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask and a bias as one tensor that is added to logits.

    Args:
        mask: Truths where a key is seen, or numbers to add; broadcasts to the bias.
        bias: `[B or 1, H, Q, K]`.
        dtype: Of the logits. Its lowest number masks, and sums stop there: below it is -inf, and a
            row of nothing else (left padding) becomes NaN.
    """
    lowest = torch.finfo(dtype).min
    wide = bias.to(torch.promote_types(dtype, bias.dtype))
    sums = torch.where(mask, wide, lowest) if mask.dtype == torch.bool else mask + wide
    return sums.clamp(min=lowest).to(dtype)


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of the cache that an attention call reads, before its cache takes the new keys.

    Attributes:
        queries: How many queries there are.
        keys: How many keys.
        first_query: The first query's slot; a tensor in a static cache, which counts on its device.
        first_key: The first key's slot, likewise.
    """

    queries: int
    keys: int
    first_query: int | torch.Tensor = 0
    first_key: int | torch.Tensor = 0

    @classmethod
    def of(cls, attention: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Slots:
        """Return the slots of a call.

        Args:
            attention: The attention, whose `layer_idx` names its part of the cache.
            hidden: Its hidden states, `[B, Q, D]`.
            kwargs: Its other arguments, or those of its layer, which has the same cache.
                Attentions that run several times have one part of it for each time (Dory).
        """
        cache, queries = cache_among(kwargs), hidden.shape[1]
        if cache is None:
            return cls(queries, queries)
        require_counted_cache(cache)
        layer: int = attention.layer_idx + kwargs.get(CACHE_OFFSET, 0)
        first = (getattr(cache, "get_query_offset", None) or cache.get_seq_length)(layer)
        size: Any = queries
        if _takes_positions(type(cache)):
            size = torch.arange(queries, device=hidden.device) + first
        keys, first_key = cache.get_mask_sizes(size, layer)
        return cls(queries, keys, first, first_key)

    @property
    def end(self) -> int | None:
        """Return the slot behind the last query's; None if its device would be waited for."""
        if isinstance(self.first_query, int):
            return self.first_query + self.queries
        # A static cache has as many slots as keys, unless its window moves.
        is_whole = isinstance(self.first_key, int) and self.first_key == 0
        return self.keys if is_whole else None

    def span(
        self,
        device: torch.device,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> Span:
        """Return the queries and keys as tensors on a device."""
        return Span(
            torch.arange(self.queries, device=device) + self.first_query,
            torch.arange(self.keys, device=device) + self.first_key,
            positions,
            mask,
        )


def _takes_positions(cache_class: Any) -> bool:
    """Return whether caches of a class count by positions (transformers 5.0), not by numbers."""
    # Each class is asked once, because that takes longer than a small kernel. Dynamo warns of
    # `functools.cache`.
    if cache_class not in _TAKES_POSITIONS:
        parameters = inspect.signature(cache_class.get_mask_sizes).parameters
        _TAKES_POSITIONS[cache_class] = "cache_position" in parameters
    return _TAKES_POSITIONS[cache_class]


def _logits_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of an attention's logits: autocast's where that is on."""
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
