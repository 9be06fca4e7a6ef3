"""Rotation on a CPU from cos and sin, in plain torch and without large temporaries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rope_patch.ops.modes import needs_plain_torch
from rope_patch.ops.reference import rotate

# Elements rotated at once. Temporaries of this size stay in the cache, where those of a whole
# tensor would pass through memory several times.
_BLOCK_NUMEL = 2**19

# Up to this many elements, which torch leaves to one thread, calls dominate the cost: queries and
# keys are joined and rotated at once.
_JOINED_NUMEL = 2**15

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, type(None)}


class _Layout(NamedTuple):
    interleaved: bool
    heads_dim: int
    conjugate: bool = False  # rotate backwards, as for gradients


def rope_from_cos_sin(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
    repeated: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys by the cos and sin of a transformers rotary module.

    In float32 the result equals transformers' own `apply_rotary_pos_emb` to the bit.

    Args:
        q: Queries, `[B, H, S, D]`.
        k: Keys, `[B, K, S, D]`, if any.
        cos: `[B, S, R]`, or `[1, S, R]` for all rows: one number for each rotated dimension, the
            same for both dimensions of a pair.
        sin: The same.
        interleaved: See `rope_patch.ops.reference.rotate`.
        heads_dim: Dimension of the heads: 1, or 2 for `[B, S, H, D]`.
        repeated: Whether cos and sin are as above (Llama, Cohere). If not, they have one number for
            each pair, `[..., R / 2]`, like the first half of GLM's.

    Returns:
        Both, in their dtypes and memory layouts; computed in float32 or wider and rounded once.
        Dimensions beyond the first R keep their values.
    """
    if _needs_reference(q, k, cos, sin):
        pairs = (_pairs(c, interleaved)[0] if repeated else c for c in (cos, sin))
        cos, sin = (c.unsqueeze(heads_dim) for c in pairs)
        rotated_q = rotate(q, cos, sin, interleaved=interleaved)
        return rotated_q, None if k is None else rotate(k, cos, sin, interleaved=interleaved)
    if not repeated:
        dim = -1 if interleaved else -2
        cos, sin = (torch.stack((c, c), dim).flatten(-2) for c in (cos, sin))
    return _rotate_differentiably(q, k, cos, sin, _Layout(interleaved, heads_dim))


def _needs_reference(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    return (
        torch.compiler.is_compiling()
        or needs_plain_torch()
        or not {type(q), type(k), type(cos), type(sin)} <= _PLAIN_TYPES
        or not q.is_cpu
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def _rotate_differentiably(q: Any, k: Any, *rest: Any) -> Any:
    needs_grad = (q is not None and q.requires_grad) or (k is not None and k.requires_grad)
    if needs_grad and torch.is_grad_enabled():
        return _RotationFunction.apply(q, k, *rest)
    return _rotate_both(q, k, *rest)


class _RotationFunction(torch.autograd.Function):
    """Rotation; its gradient is the backward rotation."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, cos: Any, sin: Any, layout: _Layout) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        rotated = _rotate_both(q, k, cos, sin, layout)
        for x, needs_grad in zip(rotated, ctx.needs_input_grad, strict=False):
            if x is not None and not needs_grad:
                ctx.mark_non_differentiable(x)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backwards = ctx.layout._replace(conjugate=not ctx.layout.conjugate)
        return *_rotate_differentiably(*grads, *ctx.saved_tensors, backwards), None, None, None


def _rotate_both(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, layout: _Layout) -> Any:
    cos, sin = cos.unsqueeze(layout.heads_dim), sin.unsqueeze(layout.heads_dim)
    if q is not None and k is not None and q.numel() + k.numel() <= _JOINED_NUMEL:
        return _rotate_joined(q, k, cos, sin, layout)
    cos, sin = _upcast(cos), _upcast(sin)
    return tuple(None if x is None else _rotate_in_blocks(x, cos, sin, layout) for x in (q, k))


def _rotate_joined(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, layout: _Layout) -> Any:
    wide = _upcast(torch.cat((q, k), dim=layout.heads_dim))
    part = wide if cos.shape[-1] == wide.shape[-1] else wide[..., : cos.shape[-1]]
    by_sin = part * sin
    _combine_products(part.mul_(cos), by_sin, part, layout)
    heads = (q.shape[layout.heads_dim], k.shape[layout.heads_dim])
    rotated_q, rotated_k = wide.split_with_sizes(heads, dim=layout.heads_dim)
    return torch.empty_like(q).copy_(rotated_q), torch.empty_like(k).copy_(rotated_k)


def _rotate_in_blocks(
    x: Any, cos: torch.Tensor, sin: torch.Tensor, layout: _Layout
) -> torch.Tensor:
    rotated = torch.empty_like(x)
    whole = (x, rotated, cos, sin)
    rotary_dim, tokens_dim = cos.shape[-1], 3 - layout.heads_dim
    if rotary_dim < x.shape[-1]:
        rotated[..., rotary_dim:].copy_(x[..., rotary_dim:])
        whole = (x[..., :rotary_dim], rotated[..., :rotary_dim], cos, sin)
    if x.numel() <= _BLOCK_NUMEL:
        _rotate_block(*whole, layout)
    else:
        size = max(1, _BLOCK_NUMEL * x.shape[tokens_dim] // x.numel())
        for part, out, c, s in zip(*(t.split(size, dim=tokens_dim) for t in whole), strict=True):
            _rotate_block(part, out, c, s, layout)
    return rotated


def _rotate_block(
    x: Any, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: _Layout
) -> None:
    wide = _upcast(x)
    by_sin = wide * sin
    if wide is x:
        _combine_products(x * cos, by_sin, out, layout)
    else:
        _combine_products(wide.mul_(cos), by_sin, wide, layout)
        out.copy_(wide)


def _combine_products(by_cos: Any, by_sin: Any, out: torch.Tensor, layout: _Layout) -> None:
    """Add rounded products, as transformers does; `out` may be `by_cos`."""
    first, second = _pairs(by_cos, layout.interleaved)
    first_by_sin, second_by_sin = _pairs(by_sin, layout.interleaved)
    out_first, out_second = (first, second) if out is by_cos else _pairs(out, layout.interleaved)
    sign = -1 if layout.conjugate else 1
    torch.sub(first, second_by_sin, alpha=sign, out=out_first)
    torch.add(second, first_by_sin, alpha=sign, out=out_second)


def _pairs(x: torch.Tensor, interleaved: bool) -> Any:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x.split_with_sizes((x.shape[-1] // 2,) * 2, dim=-1)  # faster than chunk


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
