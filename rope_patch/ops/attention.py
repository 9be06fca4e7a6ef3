"""The op `mapped_attention`: attention whose distances go through a position map, in one launch."""

from __future__ import annotations

import torch

from rope_patch.ops import dispatch, self_check
from rope_patch.ops.attention_reference import AttentionRegions
from rope_patch.ops.self_check import MAPPED_ATTENTION, KernelVariant

_MOST_DIMS = 256  # of a head; a tile of wider ones does not fit into a multiprocessor


def mapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    regions: AttentionRegions,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    interleaved: bool = False,
    kernels: str = "auto",
) -> torch.Tensor | None:
    """Return attention by the Triton kernel; None where it does not run or fails its check.

    Queries and keys are turned by the shifts of their regions in registers, angles are exact, and
    no logits and no turned keys are stored. Differentiable once in queries, keys, values and sinks.

    Args:
        query: Rotated queries, `[B, H, Q, D]`; any strides.
        key: Rotated keys, `[B, K, S, D]`; any strides.
        value: `[B, K, S, E]`; any strides.
        regions: The keys that each query sees, on the tensors' device.
        scaling: Factor of the logits.
        softcap: Logits become softcap * tanh(logits / softcap).
        sinks: A logit for each head that no value goes with, `[H]`.
        interleaved: See `rope_patch.ops.rope`.
        kernels: See `rope_patch.ops.use_triton`.

    Returns:
        `[B, H, Q, E]`, 0 for queries without keys, in memory tokens before heads.

    Raises:
        ValueError: `kernels` is "triton" and no kernel of Triton can run.
        RuntimeError: `kernels` is "triton" and this kernel is wrong.
    """
    if not _takes(query, key, value, regions, sinks) or not dispatch.use_triton(query, kernels):
        return None
    kernel = dispatch.kernel_module("attention")
    sizes = kernel.head_sizes(query, key, value, regions)
    rows, _, _ = kernel.tile_size(query, key, sizes)
    splits = kernel.count_splits(query, key)
    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    variant = KernelVariant(
        op=MAPPED_ATTENTION,
        device=query.device,
        dtype=query.dtype,
        key_dtype=key.dtype,
        heads=query.shape[1],
        key_heads=key.shape[1],
        head_dim=query.shape[-1],
        rotary_dim=regions.rotary_dim,
        interleaved=interleaved,
        needs_grad=needs_grad,
        value_dim=value.shape[-1],
        tile_rows=rows,
        shift_parts=regions.parts,
        has_softcap=softcap is not None,
        sink_dtype=None if sinks is None else sinks.dtype,
        shares_keys=splits > 1,
    )
    if variant not in self_check.passed and not self_check.passes(variant, kernels, variant):
        return None
    how = (scaling, softcap, interleaved, splits)
    output: torch.Tensor
    if needs_grad:
        backward = dispatch.kernel_module("attention_backward")
        output = backward.AttentionFunction.apply(query, key, value, sinks, regions, *how)
    else:
        output, _ = kernel.launch(query, key, value, sinks, regions, *how)
    return output


def _takes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    regions: AttentionRegions,
    sinks: torch.Tensor | None,
) -> bool:
    """Return whether the kernel takes tensors of these kinds."""
    tensors = [query, key, value] if sinks is None else [query, key, value, sinks]
    return (
        query.dtype == key.dtype == value.dtype
        and all(x.device == query.device for x in (*tensors, *vars(regions).values()))
        and max(query.shape[-1], value.shape[-1]) <= _MOST_DIMS
        and query.shape[1] % key.shape[1] == 0
    )
