"""What a kernel is compiled for: dtypes, sizes, layouts and settings of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

ROPE, QK_NORM_ROPE, REROTATE = "rope", "qk_norm_rope", "rerotate_"

# `rope_into_cache` without and with norms.
ROPE_INTO_CACHE, QK_NORM_ROPE_INTO_CACHE = "rope_into_cache", "qk_norm_rope_into_cache"

# Triton compiles other code for strides that are multiples of 16.
_STRIDE_UNIT = 16


class Layout(NamedTuple):
    """The memory layout of a tensor: its sizes and strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def resized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return strides for another shape: equal order, equal gaps, equal divisibility by 16."""
        strides, extent, real_extent = [0] * len(shape), 1, 1
        for i in sorted(range(len(shape)), key=lambda i: (self.strides[i], -i)):
            stride = extent + (self.strides[i] - extent) % _STRIDE_UNIT
            if stride == extent and self.strides[i] > real_extent:
                stride += _STRIDE_UNIT
            strides[i] = stride
            extent, real_extent = stride * shape[i], self.strides[i] * self.shape[i]
        return tuple(strides)


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """What one compiled kernel, or a forward kernel with its backward, is compiled for.

    Attributes:
        op: `ROPE`, `QK_NORM_ROPE`, `REROTATE`, `ROPE_INTO_CACHE` or `QK_NORM_ROPE_INTO_CACHE`.
        device: Where it runs.
        dtype: Of queries.
        key_dtype: Of keys.
        heads: Query heads.
        key_heads: Key heads; 0 without keys.
        head_dim: Dimensions of a head.
        rotary_dim: How many of them rotate.
        interleaved: See `rope_patch.ops.rope`.
        heads_dim: See `rope_patch.ops.rope`.
        sections: Whether pairs rotate by positions on several axes.
        inplace: Whether queries and keys are overwritten.
        needs_grad: Whether the backward pass is run, too.
        weight_dtype: Of the norm's weights.
        norm_all_heads: Whether all heads of a token are normed together.
        offset: Added to the weights.
        trains_weights: Whether the weights have gradients, which takes a kernel of its own.
        recompute_input: Whether the backward pass starts from the output.
        several_layers: Whether keys of several layers are re-rotated in one launch.
        q_layout: Memory layout of queries to imitate; None: tokens before heads.
        k_layout: The same for keys.
        value_dim: Dimensions of a value that is written into a cache.
        v_layout: Memory layout of values; None: tokens before heads.
        key_cache_layout: Memory layout of the cache for keys; None: contiguous.
        value_cache_layout: The same for values.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    key_dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    heads_dim: int = 2
    sections: bool = False
    inplace: bool = False
    needs_grad: bool = False
    weight_dtype: torch.dtype = torch.float32
    norm_all_heads: bool = False
    offset: float = 0.0
    trains_weights: bool = False
    recompute_input: bool = False
    several_layers: bool = False
    q_layout: Layout | None = None
    k_layout: Layout | None = None
    value_dim: int = 0
    v_layout: Layout | None = None
    key_cache_layout: Layout | None = None
    value_cache_layout: Layout | None = None

    @property
    def has_norms(self) -> bool:
        """Return whether queries and keys are normed."""
        return self.op in (QK_NORM_ROPE, QK_NORM_ROPE_INTO_CACHE)

    @property
    def writes_cache(self) -> bool:
        """Return whether keys and values are written into a cache."""
        return self.op in (ROPE_INTO_CACHE, QK_NORM_ROPE_INTO_CACHE)

    def __str__(self) -> str:
        heads = f"{self.heads} + {self.key_heads}" if self.key_heads else str(self.heads)
        backward = "backward with weights" if self.trains_weights else "backward"
        parts = [
            f"{self.op} in {_name(self.dtype)}",
            f"{heads} heads of {self.head_dim}, {self.rotary_dim} rotated",
            "neighbours" if self.interleaved else "halves",
            f"heads_dim {self.heads_dim}",
            "sections" if self.sections else "",
            "in place" if self.inplace else "",
            f"weights in {_name(self.weight_dtype)}" if self.has_norms else "",
            "all heads normed together" if self.norm_all_heads else "",
            backward if self.needs_grad else "",
            "input recomputed" if self.recompute_input else "",
            "several layers" if self.several_layers else "",
        ]
        return ", ".join(part for part in parts if part)


def variant_fields(
    q: torch.Tensor,
    k: torch.Tensor | None,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    needs_grad: bool,
) -> dict[str, Any]:
    """Return the attributes of `KernelVariant` that all ops have."""
    return {
        "device": q.device,
        "dtype": q.dtype,
        "key_dtype": q.dtype if k is None else k.dtype,
        "heads": q.shape[heads_dim],
        "key_heads": 0 if k is None else k.shape[heads_dim],
        "head_dim": q.shape[-1],
        "rotary_dim": 2 * (packed_freqs.shape[-1] - 1),
        "interleaved": interleaved,
        "heads_dim": heads_dim,
        "sections": sections is not None,
        "needs_grad": needs_grad,
    }


def norm_fields(weight: torch.Tensor, offset: float, trains_weights: bool) -> dict[str, Any]:
    """Return the attributes that a norm adds."""
    return {
        "weight_dtype": weight.dtype,
        "norm_all_heads": weight.ndim == 2,
        "offset": offset,
        "trains_weights": trains_weights,
    }


def layout_fields(q: torch.Tensor, k: torch.Tensor | None) -> dict[str, Any]:
    """Return the memory layouts of queries and keys."""
    layouts = (x if x is None else _layout(x) for x in (q, k))
    return dict(zip(("q_layout", "k_layout"), layouts, strict=True))


def cache_fields(
    v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> dict[str, Any]:
    """Return the attributes that the write into a cache adds."""
    return {
        "value_dim": v.shape[-1],
        "v_layout": _layout(v),
        "key_cache_layout": _layout(key_cache),
        "value_cache_layout": _layout(value_cache),
    }


def _layout(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), x.stride())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
