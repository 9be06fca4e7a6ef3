"""Multi-head latent attention under a cache: the cached rotary slice and the softmax scale.

transformers caches a token as its latent (in `keys`), from which keys and values without rotation
are expanded, and beside it the one rotated slice that all heads share (in `values`). Only the slice
is re-rotated. Sparse attention (DSA) caches a third tensor, the keys of its indexer, which rotate
in part.

The attention factor belongs into the softmax scale. A scale is one number for all rows, but rows
have factors of their own, so queries are multiplied in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from rope_patch.ops.reference import rotate
from rope_patch.patching.architecture.mla_scale import find_mla_attentions
from rope_patch.patching.architecture.rotary_modules import CANNOT_FOLLOW_YET
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.dynamic.cache_record import (
    RotationRecord,
    cached_keys,
    positions_of_slots,
)
from rope_patch.patching.dynamic.frequency_table import FrequencyTable
from rope_patch.patching.torch_state import torch_defaults
from rope_patch.patching.undo_log import UndoLog
from rope_patch.rope_config import by_layer_type
from rope_patch.utils.errors import Refused

# How indexers join the rotated part of a key with the rest: the rotated part is first, or last.
_ROTATED_FIRST, _ROTATED_LAST = "cat([k_rot, k_pass]", "cat([k_pass, k_rot]"

# The last linear layer before the queries; attentions without a latent for queries have `q_proj`.
_QUERY_PROJECTIONS = ("q_gate_proj", "q_b_proj", "q_proj")


@dataclass(frozen=True)
class LatentCache:
    """What a decoder with latent attention caches.

    Attributes:
        layer_types: The layer type of each slot of the cache that rotates; "" for the others.
        interleaved: Whether pairs of the cached slice are neighbours; see `rope_patch.ops.rope`.
        indexer_end: "first" or "last": which part of an indexer's key is rotated; None without
            indexers.
        rotated_width: R, the width of the rotated slice.
    """

    layer_types: list[str | None]
    interleaved: bool
    indexer_end: str | None
    rotated_width: int

    @classmethod
    def of(cls, traits: RotaryTraits) -> LatentCache | None:
        """Return what the decoder caches; None if its attention is not latent.

        Raises:
            ValueError: The cached keys cannot be re-rotated.
        """
        if "qk_rope_head_dim" not in vars(traits.config):
            return None
        name = type(traits.config).__name__
        decoder = traits.require_decoder(is_owner=False)
        if any(getattr(each, "compressor", None) is not None for each in decoder.modules()):
            raise Refused(
                f"{name} caches keys that serve as values, too, and blocks of tokens compressed "
                f"into one (DeepSeek-V4), in a cache of its own, which {CANNOT_FOLLOW_YET}"
            )
        attentions = find_mla_attentions(decoder)
        if not attentions or not all(_caches_latent(type(each)) for each in attentions):
            raise Refused(
                f"{name} has multi-head latent attention, and this release of transformers caches "
                f"its keys expanded, which {CANNOT_FOLLOW_YET}; or use a newer release"
            )
        indexers = [each for each in decoder.modules() if type(each).__name__.endswith("Indexer")]
        layouts = {is_output_interleaved(type(each), traits) for each in (*attentions, *indexers)}
        if len(layouts) > 1:
            raise Refused(
                f"{name} rotates the keys of its attention and of its indexer in two layouts, "
                f"which {CANNOT_FOLLOW_YET}"
            )
        return cls(
            _layer_types(attentions, traits.config),
            layouts.pop(),
            _indexer_end(indexers),
            2 * len(next(iter(traits.frequencies.values())).inv_freq),
        )

    @property
    def has_indexers(self) -> bool:
        """Return whether indexers cache keys of their own."""
        return self.indexer_end is not None

    def cached_keys(
        self, cache: Any, record: RotationRecord, past: Any
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the rotated slices and the indexers' keys; see `cache_record.cached_keys`."""
        yield from cached_keys(
            cache, record, past, attribute="values", has_indexers=self.has_indexers
        )
        for index, layer in enumerate([] if cache is None else cache.layers):
            keys = getattr(layer, "indexer_keys", None)
            if not self.has_indexers or keys is None or keys.numel() == 0:
                continue
            if not torch.compiler.is_compiling():
                layer.indexer_keys = keys = _writable_indexer_keys(keys)
            slots = keys.shape[1]
            end = slots if record.static else past
            start = 0 if self.indexer_end == "first" else keys.shape[2] - self.rotated_width
            yield index, keys[:, None, :, start:], positions_of_slots(record, end, slots)


class HooksOfForward(Protocol):
    """What the softmax scale needs of `rope_patch.patching.dynamic.hooks.LengthHooks`."""

    frequency_table: FrequencyTable
    rotated_layer_types: list[str | None]
    fixed_length: float | None

    def rows_of_forward(self) -> torch.Tensor | None:
        """Return the rows' frequencies in the decoder's present forward; None outside of it."""


def attach_softmax_factor(decoder: nn.Module, hooks: HooksOfForward, undo_log: UndoLog) -> None:
    """Multiply the queries of latent attentions, instead of the softmax scale.

    Args:
        decoder: The decoder.
        hooks: The decoder's hooks, which know the lengths.
        undo_log: Removes the hooks.
    """
    for attention in find_mla_attentions(decoder):
        layer_type = hooks.rotated_layer_types[attention.layer_idx]
        if layer_type not in hooks.frequency_table.softmax_columns:
            continue
        name = next(n for n in _QUERY_PROJECTIONS if getattr(attention, n, None) is not None)
        query_width = head_width = attention.qk_head_dim
        if name == "q_gate_proj":  # A.X K2: queries and gates
            head_width += attention.v_head_dim
        change = partial(_scale_queries, hooks, layer_type, query_width, head_width)
        undo_log.hook_output(getattr(attention, name), change)
        undo_log.hook(attention, before=partial(_require_projection, getattr(attention, name)))


def softmax_factor(
    hooks: HooksOfForward, layer_type: str | None, device: torch.device
) -> torch.Tensor:
    """Return what multiplies the queries of a layer type, a number or `[B, 1, 1]`.

    Raises:
        ValueError: The attention runs outside the decoder's forward, where no length is known.
    """
    table, rows = hooks.frequency_table, hooks.rows_of_forward()
    if rows is None and hooks.fixed_length is not None:
        rows = table.rows_on([table.valid_until(hooks.fixed_length)], device)
    if rows is None:
        raise Refused(
            "an attention ran outside its decoder's forward, perhaps by gradient checkpointing. "
            "Its softmax scale depends on the length, which is unknown there: say the length "
            "beforehand (`handle.fix_length(...)`), switch gradient checkpointing off, or use a "
            "method whose frequencies stay, such as yarn"
        )
    return table.softmax_factor(rows, layer_type, device)


def _scale_queries(
    hooks: HooksOfForward,
    layer_type: str | None,
    query_width: int,
    head_width: int,
    module: nn.Module,
    args: Any,
    output: torch.Tensor,
) -> torch.Tensor:
    factor = softmax_factor(hooks, layer_type, output.device)
    factor = factor[..., None] if factor.ndim else factor
    heads = output.unflatten(-1, (-1, head_width))
    # Wide, because a factor rounded to 16 bits would shift all logits the same way.
    queries = (heads[..., :query_width].float() * factor).to(output.dtype)
    if query_width < head_width:
        queries = torch.cat([queries, heads[..., query_width:]], dim=-1)
    return queries.flatten(-2)


def _require_projection(projection: nn.Module, attention: Any, args: Any, kwargs: Any) -> None:
    """Raise if another module has taken the place of the hooked one, such as an adapter's."""
    if any(getattr(attention, name, None) is projection for name in _QUERY_PROJECTIONS):
        return
    raise Refused(
        f"the query projection of {type(attention).__name__} was replaced after the patch, perhaps "
        "by an adapter, and the attention factor would miss a part of it: expected the module "
        "that was patched; call rope_patch.patch again, after the adapter was added"
    )


@torch_defaults()
def is_output_interleaved(module_class: Any, traits: RotaryTraits) -> bool:
    """Return whether the pairs of a rotated key are neighbours, rather than half a head apart.

    Unlike `RotaryTraits.is_interleaved`, this is the layout in which keys are cached. DeepSeek-V3
    reads neighbours and writes halves.

    Args:
        module_class: An attention or an indexer.
        traits: Facts about the rotary module.

    Raises:
        ValueError: The forward rotates in neither layout, or in both.
    """
    forward = inspect.unwrap(module_class.forward)
    functions = [
        forward.__globals__[name]
        for name in forward.__code__.co_names
        if name.startswith("apply_rotary") and name in forward.__globals__
    ]
    inv_freq = next(iter(traits.frequencies.values())).inv_freq.float()
    angle = torch.tensor([[0, 1, 7, 30]])[..., None] * inv_freq
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 4, 2 * len(inv_freq), generator=generator)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    layouts = set()
    for apply in functions:
        unrotated, rotated = _apply(apply, keys, 0 * angle), _apply(apply, keys, angle)
        layouts |= {
            interleaved
            for interleaved in (False, True)
            if torch.allclose(
                rotate(unrotated, cos, sin, interleaved=interleaved), rotated, atol=1e-5
            )
        }
    if len(layouts) != 1:
        raise Refused(
            f"{module_class.__name__} turns keys neither as pairs of neighbours nor of halves, and "
            f"other ways {CANNOT_FOLLOW_YET}"
        )
    return layouts.pop()


def _apply(apply: Any, keys: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Return the keys that a model's function rotates by `angle`, `[1, S, R / 2]`."""
    try:
        both = torch.cat([angle, angle], dim=-1)
        rotated: torch.Tensor = apply(keys, keys, both.cos(), both.sin())[1]
    except TypeError:  # DeepSeek-V2: complex numbers
        rotated = apply(keys, keys, torch.polar(torch.ones_like(angle), angle))[1]
    return rotated


def _caches_latent(attention: type[nn.Module]) -> bool:
    """Return whether an attention's forward caches the latent, and expands it behind the cache."""
    # Transformers 5.0 caches the latent nowhere. Some releases around 5.17 have `expand_kv`, and
    # yet the sparse attentions (DSA) call it ahead of the cache.
    source = inspect.getsource(attention.forward)
    return "expand_kv(" in source.partition(".update(")[2]


def _layer_types(attentions: list[Any], config: Any) -> list[str | None]:
    """Return the layer type of every slot of the cache, "" for slots without latent attention."""
    has_types = None not in by_layer_type(config.rope_parameters)
    layer_types: list[str | None] = [""] * (1 + max(each.layer_idx for each in attentions))
    for each in attentions:
        layer_types[each.layer_idx] = config.layer_types[each.layer_idx] if has_types else None
    return layer_types


def _indexer_end(indexers: list[nn.Module]) -> str | None:
    if not indexers:
        return None
    sources = [inspect.getsource(inspect.unwrap(type(each).forward)) for each in indexers]
    for end, form in (("first", _ROTATED_FIRST), ("last", _ROTATED_LAST)):
        if all(form in source for source in sources):
            return end
    raise Refused(
        f"{type(indexers[0]).__name__} caches keys of its own, and which part of them is rotated "
        f"is not known here, so they {CANNOT_FOLLOW_YET}"
    )


def _writable_indexer_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return an indexer's keys as a tensor that may be changed in place."""
    # An indexer's keys choose tokens by rank, so no gradient flows through the keys.
    outside = keys.is_inference() and not torch.is_inference_mode_enabled()
    return keys.detach().clone() if outside else keys.detach()
