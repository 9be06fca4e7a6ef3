"""Attention of one part of the keys, with the log-sum-exp that merging the parts needs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax attention and the log-sum-exp of its logits. Every query must see some key.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, K, S, D]`; H is a multiple of K.
        value: `[B, K, S, E]`.
        scaling: Factor of the logits.
        is_causal: Whether query n sees the first n + 1 keys alone; only for Q = S.
        mask: `[Q, S]`, True where a query sees a key.

    Returns:
        Output `[B, H, Q, E]` in the query's dtype, and log-sum-exp `[B, H, Q]` in float32, or
        float64 for float64.
    """
    # The operators behind torch's public function check nothing; they read other memory where
    # components are not neighbours.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if query.shape[2] > 1 and _fits_cpu_operator(query, key, value):
        return _on_cpu(query, key, value, scaling, is_causal, mask)
    part = None
    if query.is_cuda:
        part = _on_cuda(query, key, value, scaling, is_causal, mask)
    if part is None:
        part = attend_in_torch(query, key, value, scaling, is_causal=is_causal, mask=mask)
    return part


def attend_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend_part` in plain torch; stores all logits."""
    rows, heads, steps, width = query.shape
    groups = heads // key.shape[1]
    # Heads that share keys are rows of one product, which copies no keys.
    folded = query.reshape(rows, key.shape[1], groups * steps, width)
    scores = torch.matmul(folded, key.transpose(-1, -2)) * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if is_causal:
        mask = torch.ones(steps, key.shape[2], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat(groups, 1), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    output = torch.matmul(weights, value).view(rows, heads, steps, value.shape[-1])
    return output, lse.view(rows, heads, steps)


def _fits_cpu_operator(*tensors: torch.Tensor) -> bool:
    """Return whether torch's operator for CPUs takes queries, keys and values as they are.

    These are the conditions under which `scaled_dot_product_attention` chooses it.
    """
    first = tensors[0]
    return first.dtype in _CPU_DTYPES and all(
        each.device.type == "cpu"
        and each.layout == torch.strided
        and not each.is_nested
        and each.ndim == 4
        and each.dtype == first.dtype
        and each.shape[0] == first.shape[0]
        and each.shape[-1] == first.shape[-1]
        and each.stride(-1) == 1
        and each.numel() > 0
        for each in tensors
    )


def _on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    is_causal, mask = how
    if (groups := query.shape[1] // key.shape[1]) > 1 and not _shares_keys_on_cpu():
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = None if mask is None else _as_bias(mask, query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scaling
    )


@functools.cache
def _shares_keys_on_cpu() -> bool:
    """Return whether torch's operator for CPUs lets several heads share keys.

    That of torch 2.6 reads behind the keys instead, without an error. The keys of this trial lie in
    front of others, so that it reads its own memory.
    """
    values = torch.arange(4.0).view(1, 4, 1, 1).repeat(1, 1, 1, 16)
    shared = values[:, :2]
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(values, shared, shared)
    return output[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def _on_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *how: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a part from a fused kernel; None where torch's own checks let none take it."""
    is_causal, mask = how
    groups = query.shape[1] // key.shape[1]
    is_padded = query.shape[-1] % 8  # as the public function pads, after these checks
    if (
        mask is None
        and not is_padded
        and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, is_causal, groups > 1))
    ):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scaling
        )
        return output, lse
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = None
    if mask is not None:
        # The kernel wants rows that begin at multiples of 16 bytes.
        width = mask.shape[1]
        padded = torch.zeros(
            mask.shape[0], -(-width // 16) * 16, dtype=query.dtype, device=query.device
        )
        padded[:, :width].masked_fill_(~mask, -torch.inf)
        bias = padded[:, :width].expand(*query.shape[:2], -1, -1)
    if not can_use_efficient_attention(SDPAParams(query, key, value, bias, 0.0, is_causal, False)):
        return None
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scaling
    )
    return output, lse[..., : query.shape[2]]  # the kernel pads the queries


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -torch.inf)[None, None]


class MergedParts:
    """Attention merged from parts of the keys, in place.

    Attributes:
        output: `[B, H, Q, E]`, float32 or wider.
        lse: Log-sum-exp of the logits so far, `[B, H, Q]`; -inf for queries without keys.
    """

    def __init__(self, query: torch.Tensor, value: torch.Tensor) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = query.shape[:3]
        self.output = torch.zeros(*shape, value.shape[-1], dtype=wide, device=query.device)
        self.lse = torch.full(shape, -torch.inf, dtype=wide, device=query.device)

    def add(self, rows: slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the attention of some queries over further keys."""
        old = self.lse[:, :, rows]
        lse = lse.to(old.dtype)
        new = torch.logaddexp(old, lse)
        target = self.output[:, :, rows]
        target.mul_(torch.exp(old - new)[..., None])
        target.addcmul_(output.to(target.dtype), torch.exp(lse - new)[..., None])
        old.copy_(new)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Merge a logit for each head that no value goes with (attention sinks), `[H]`."""
        sinks = sinks.to(self.lse.dtype).view(1, -1, 1)
        self.output.mul_(torch.sigmoid(self.lse - sinks)[..., None])
