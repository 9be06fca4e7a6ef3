"""Validation of the ops' tensors, once for each new set of shapes."""

from __future__ import annotations

import math

import torch

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def validate_shapes(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    heads_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
) -> None:
    """Raise ValueError, naming the expected shape, dtype or device, if tensors do not match."""
    if heads_dim not in (1, 2):
        raise ValueError(f"heads_dim must be 1 ([B, H, S, D]) or 2 ([B, S, H, D]), got {heads_dim}")
    if q.ndim != 4:
        raise ValueError(f"q must have 4 dimensions, got {_shape(q)}")
    _require_float(q, k, q_weight, k_weight)
    _require_one_device(
        q, k=k, positions=positions, packed_freqs=packed_freqs, sections=sections,
        q_weight=q_weight, k_weight=k_weight,
    )  # fmt: skip
    batch, tokens, dim = q.shape[0], q.shape[3 - heads_dim], q.shape[-1]
    if k is not None and (k.ndim != 4 or (k.shape[0], k.shape[3 - heads_dim], k.shape[-1]) != (
        batch, tokens, dim,
    )):  # fmt: skip
        raise ValueError(
            f"k must be like q but for the number of heads (dimension {heads_dim}), got q "
            f"{_shape(q)} and k {_shape(k)}"
        )
    if positions.dtype not in _INTEGERS:
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    axes = positions.shape[:-2] if sections is not None else ()
    matches = positions.shape[len(axes) :] in ((tokens,), (batch, tokens), (1, tokens))
    if not matches or (sections is not None and len(axes) != 1):
        expected = f"[{tokens}] or [{batch}, {tokens}]" if sections is None else (
            f"[axes, {batch}, {tokens}]"
        )  # fmt: skip
        raise ValueError(f"positions must be {expected}, got {_shape(positions)}")
    pairs = packed_freqs.shape[-1] - 1
    rows = tuple(packed_freqs.shape[:-1])
    if packed_freqs.dtype != torch.int64 or rows not in ((), (1,), (batch,)):
        raise ValueError(
            f"packed_freqs must be int64 [R / 2 + 1] or [{batch}, R / 2 + 1] as pack_frequencies "
            f"returns them, got {packed_freqs.dtype} {_shape(packed_freqs)}"
        )
    if packed_freqs.stride(-1) != 1 or not (sections is None or sections.is_contiguous()):
        raise ValueError(
            "packed_freqs and sections must be contiguous, but for the rows of packed_freqs"
        )
    if 2 * pairs > dim:
        raise ValueError(f"{pairs} pairs do not fit into heads of {dim} dimensions")
    if sections is not None and tuple(sections.shape) != (pairs,):
        raise ValueError(f"sections must be [{pairs}], one axis a pair, got {_shape(sections)}")
    if q_weight is None or k is None or k_weight is None:
        return
    heads, key_heads = q.shape[heads_dim], k.shape[heads_dim]
    shapes = (tuple(q_weight.shape), tuple(k_weight.shape))
    if shapes not in (((dim,), (dim,)), ((heads, dim), (key_heads, dim))):
        raise ValueError(
            f"weights must be [{dim}] both, or [{heads}, {dim}] and [{key_heads}, {dim}] where all "
            f"heads are normed together, got {_shape(q_weight)} and {_shape(k_weight)}"
        )
    if not (q_weight.is_contiguous() and k_weight.is_contiguous()):
        raise ValueError("weights must be contiguous")


def validate_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start: torch.Tensor,
    out: torch.Tensor | None,
    heads_dim: int,
) -> None:
    """Raise ValueError if values, caches or a result do not fit queries and keys."""
    _require_float(v, key_cache, value_cache)
    _require_one_device(
        q, v=v, key_cache=key_cache, value_cache=value_cache, start=start, out=out
    )  # fmt: skip
    batch, heads, tokens = q.shape[0], k.shape[heads_dim], q.shape[3 - heads_dim]
    sizes = [batch, tokens]
    sizes.insert(heads_dim, heads)
    if v.ndim != 4 or list(v.shape[:3]) != sizes:
        raise ValueError(f"v must be {sizes} and its own dimension, got {_shape(v)}")
    slots = key_cache.shape[2] if key_cache.ndim == 4 else 0
    for name, cache, dim in (
        ("key_cache", key_cache, k.shape[-1]),
        ("value_cache", value_cache, v.shape[-1]),
    ):
        if list(cache.shape) != [batch, heads, slots, dim]:
            raise ValueError(
                f"{name} must be [{batch}, {heads}, slots, {dim}] with as many slots as the other "
                f"cache, got {_shape(cache)}"
            )
    for name, written in (("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        if written is not None and overlaps_itself(written):
            raise ValueError(
                f"{name} must have memory of its own for every element, got strides "
                f"{list(written.stride())} (expanded?): call contiguous() first"
            )
    if start.dtype not in _INTEGERS or start.numel() != 1:
        raise ValueError(f"start must be one int32 or int64, got {start.dtype} {_shape(start)}")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(
            f"out must be like q, {q.dtype} {_shape(q)}, got {out.dtype} {_shape(out)}"
        )


def overlaps_itself(x: torch.Tensor) -> bool:
    """Return whether two elements of a tensor may be one in memory, as after `expand`."""
    if x.is_contiguous():  # at once, as most are: this is asked in every call of a kernel
        return False
    reach = 0  # how far the dimensions of smaller strides go
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def may_share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether an element of one tensor may be one of the other's.

    Slices of one matrix of queries, keys and values do not: each token's rows lie apart.
    """
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    if not x.numel() or not y.numel():
        return False
    if x.element_size() != y.element_size():
        return True
    strides = {s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1}
    strides |= {s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1}
    # Steps of a period and its multiples keep what lies apart within one period apart.
    for period in strides:
        if all(stride % period == 0 for stride in strides if stride >= period):
            (low_x, high_x), (low_y, high_y) = (_range_below(period, t) for t in (x, y))
            shift = (low_y - low_x) % period
            if high_x - low_x <= shift and shift + high_y - low_y <= period:
                return False
    (low_x, high_x), (low_y, high_y) = (_range_below(math.inf, t) for t in (x, y))
    return low_x < high_y and low_y < high_x


def _range_below(period: float, x: torch.Tensor) -> tuple[int, int]:
    """Return the first element and the one behind the last, of the strides below a period."""
    inner = [(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if s < period]
    first = int(x.storage_offset())
    return first, first + sum((n - 1) * s for s, n in inner) + 1


def _require_float(*tensors: torch.Tensor | None) -> None:
    for x in tensors:
        if x is not None and x.dtype not in _FLOATS:
            raise ValueError(
                f"expected float32, bfloat16, float16 or float64, got {x.dtype}: cast to one of "
                "them before the rotation"
            )


def _require_one_device(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(
                f"all tensors must be on one device, got q on {q.device} and {name} on {x.device}: "
                f"move {name}"
            )


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))
