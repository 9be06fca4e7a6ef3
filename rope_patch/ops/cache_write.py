"""The op `rope_into_cache`: rotation, and the write of keys and values into a cache's memory."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.ops import dispatch, self_check
from rope_patch.ops.self_check import (
    QK_NORM_ROPE_INTO_CACHE,
    ROPE_INTO_CACHE,
    KernelVariant,
    cache_fields,
    layout_fields,
    norm_fields,
    variant_fields,
)
from rope_patch.ops.validation import may_share_memory, validate_cache, validate_shapes


def rope_into_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
    out: torch.Tensor | None = None,
    kernels: str = "auto",
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values into a cache; no gradients.

    Triton takes one launch for all of it, if the five tensors have one dtype. In graphs, and where
    Triton does not run, the rotation comes first and two copies into the cache follow.

    Args:
        q: Queries, `[B, S, H, D]`; any strides.
        k: Keys, `[B, S, K, D]`; any strides.
        v: Values, `[B, S, K, V]`; any strides.
        key_cache: Memory for keys, `[B, K, L, D]` whatever `heads_dim` is; any strides.
        value_cache: Memory for values, `[B, K, L, V]`.
        start: The slot of the first token in all rows, one integer on the device, which the host
            does not read. Tokens that do not fit into the L slots are not written. Triton makes
            their queries NaN; plain torch raises an error, on a GPU asynchronously.
        positions: See `rope`.
        packed_freqs: See `rope`.
        q_weight: With `k_weight`, apply RMSNorm first; see `qk_norm_rope`.
        k_weight: See `qk_norm_rope`.
        eps: See `qk_norm_rope`.
        offset: See `qk_norm_rope`.
        sections: See `rope`.
        interleaved: See `rope`.
        heads_dim: Dimension of the heads of q, k and v: 2, or 1 for `[B, H, S, D]`.
        out: Where to write rotated queries, a tensor like q; it may be q, or overlap any input.
        kernels: See `rope`.

    Returns:
        The queries, rotated.

    Raises:
        ValueError: Shapes or dtypes do not match, the kernels cannot run, or gradients are
            required.
    """
    inputs = (q, k, v, key_cache, value_cache)
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*inputs, q_weight, k_weight)
    ):
        raise ValueError(
            "rope_into_cache has no gradients, and a tensor requires them: call it under "
            "torch.no_grad(), or call rope and write into the cache"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight are given together, or neither of them")
    norms = None if q_weight is None or k_weight is None else (q_weight, k_weight, eps, offset)
    arguments: Any = (*inputs, start, positions, packed_freqs, sections, norms)
    arguments += (interleaved, heads_dim, out)
    is_triton = dispatch.use_triton(q, kernels) and not torch.compiler.is_compiling()
    dtype = q.dtype
    if not (
        is_triton
        and k.dtype == v.dtype == dtype
        and key_cache.dtype == value_cache.dtype == dtype
        and not _reads_what_it_writes(*inputs, out)
    ):
        # Plain torch reads everything before it writes, or raises where that is not enough.
        return _write_in_plain_torch(kernels, *arguments)
    op = ROPE_INTO_CACHE if norms is None else QK_NORM_ROPE_INTO_CACHE
    shape = q.shape
    checked = (
        op, q.device, dtype, shape[-1], shape[heads_dim], k.size(heads_dim), v.size(-1),
        packed_freqs.size(-1), interleaved, heads_dim, sections is None,
        None if norms is None else (norms[0].dtype, norms[0].ndim, offset),
    )  # fmt: skip
    if checked not in self_check.passed:
        validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, q_weight, k_weight)
        validate_cache(q, k, v, key_cache, value_cache, start, out, heads_dim)
        fields = variant_fields(q, k, packed_freqs, sections, interleaved, heads_dim, False)
        fields |= layout_fields(q, k) | cache_fields(v, key_cache, value_cache)
        if norms is not None:
            fields |= norm_fields(norms[0], offset, False)
        if not self_check.passes(checked, kernels, KernelVariant(op=op, **fields)):
            return _write_in_plain_torch(kernels, *arguments)
    changed = [key_cache, value_cache] if out is None else [key_cache, value_cache, out]
    torch.autograd.graph.increment_version(changed)
    return dispatch.kernel_module("cache_write").launch(*arguments)


def _reads_what_it_writes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor | None,
) -> bool:
    """Return whether one launch would overwrite what others of its programs still read."""
    inputs = (q, k, v, key_cache, value_cache)
    if out is None or out is q:
        if len({x.untyped_storage().data_ptr() for x in inputs}) == len(inputs):
            return False
        written = (key_cache, value_cache) if out is None else (key_cache, value_cache, q)
    else:
        written = (key_cache, value_cache, out)
    return any(may_share_memory(x, y) for x in written for y in inputs if x is not y)


def _write_in_plain_torch(
    kernels: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor, float, float] | None,
    interleaved: bool,
    heads_dim: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Rotate by another op, which may still choose Triton, and copy into the cache."""
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim)
    validate_cache(q, k, v, key_cache, value_cache, start, out, heads_dim)
    layout: Any = {"sections": sections, "interleaved": interleaved, "heads_dim": heads_dim}
    layout["kernels"] = kernels
    if norms is None:
        q, rotated = dispatch.rope(q, k, positions, packed_freqs, **layout)
        assert rotated is not None
    else:
        q_weight, k_weight, eps, offset = norms
        layout |= {"eps": eps, "offset": offset}
        q, rotated = dispatch.qk_norm_rope(
            q, k, q_weight, k_weight, positions, packed_freqs, **layout
        )
    slots = start.reshape(1) + torch.arange(q.shape[3 - heads_dim], device=q.device)
    for cache, x in ((key_cache, rotated), (value_cache, v)):
        heads_first = x if heads_dim == 1 else x.transpose(1, 2)
        cache.index_copy_(2, slots, heads_first.to(cache.dtype))
    return q if out is None else out.copy_(q)
