"""The rotation by tables of cos and sin on a CPU, in plain torch and without large temporaries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rope_patch.ops.modes import needs_plain_torch
from rope_patch.ops.reference import rotate

# Numbers rotated at once: what lies between input and result stays in the cache, where the whole
# would pass through memory, and be given fresh pages of it, several times.
_BLOCK_NUMEL = 2**19

# Up to so many, which torch leaves to one thread, calls are what costs: one for queries and keys.
_JOINED_NUMEL = 2**15

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, type(None)}


class _Layout(NamedTuple):
    interleaved: bool
    heads_dim: int
    conjugate: bool = False  # rotate backwards, as gradients are


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
    """Rotates queries and keys by what a rotary module of transformers hands out.

    Float32 gets the very bits of transformers' own `apply_rotary_pos_emb`.

    Args:
        q: Queries, `[B, H, S, D]`.
        k: Keys, `[B, K, S, D]`, if any.
        cos: `[B, S, R]`, or `[1, S, R]` for all rows: a number for each of the dimensions that are
            rotated, the same at both of a pair.
        sin: The same.
        interleaved: See `rope_patch.ops.reference.rotate`.
        heads_dim: Where the heads are: 1, or 2 for `[B, S, H, D]`.
        repeated: Whether cos and sin are as above (Llama, Cohere). If not, they have one number for
            each pair, `[..., R / 2]`, as the first half of GLM's has.

    Returns:
        Both, in their dtypes and memory layouts; computed in float32 at least and rounded once.
        Dimensions beyond the first R are as they were.
    """
    if _needs_reference(q, k, cos, sin):
        pairs = (_pairs(c, interleaved)[0] if repeated else c for c in (cos, sin))
        cos, sin = (c.unsqueeze(heads_dim) for c in pairs)
        turned_q = rotate(q, cos, sin, interleaved=interleaved)
        return turned_q, None if k is None else rotate(k, cos, sin, interleaved=interleaved)
    if not repeated:
        dim = -1 if interleaved else -2
        cos, sin = (torch.stack((c, c), dim).flatten(-2) for c in (cos, sin))
    return _rotate_differentiably(q, k, cos, sin, _Layout(interleaved, heads_dim))


def _needs_reference(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or needs_plain_torch()
        or not {type(q), type(k), type(cos), type(sin)} <= _PLAIN_TYPES
        or not q.is_cpu
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def _rotate_differentiably(q: Any, k: Any, *how: Any) -> Any:
    wanted = (q is not None and q.requires_grad) or (k is not None and k.requires_grad)
    return (_RotationFunction.apply if wanted and torch.is_grad_enabled() else _rotate_both)(
        q, k, *how
    )


class _RotationFunction(torch.autograd.Function):
    """Gradients are rotated backwards."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, cos: Any, sin: Any, how: _Layout) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.how = how
        ctx.set_materialize_grads(False)
        turned = _rotate_both(q, k, cos, sin, how)
        for x, needs_grad in zip(turned, ctx.needs_input_grad, strict=False):
            if x is not None and not needs_grad:
                ctx.mark_non_differentiable(x)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = ctx.how._replace(conjugate=not ctx.how.conjugate)
        return *_rotate_differentiably(*grads, *ctx.saved_tensors, back), None, None, None


def _rotate_both(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, how: _Layout) -> Any:
    cos, sin = cos.unsqueeze(how.heads_dim), sin.unsqueeze(how.heads_dim)
    if q is not None and k is not None and q.numel() + k.numel() <= _JOINED_NUMEL:
        return _rotate_joined(q, k, cos, sin, how)
    cos, sin = _upcast(cos), _upcast(sin)
    return tuple(None if x is None else _rotate_in_blocks(x, cos, sin, how) for x in (q, k))


def _rotate_joined(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, how: _Layout) -> Any:
    wide = _upcast(torch.cat((q, k), dim=how.heads_dim))
    part = wide if cos.shape[-1] == wide.shape[-1] else wide[..., : cos.shape[-1]]
    by_sin = part * sin
    _combine_products(part.mul_(cos), by_sin, part, how)
    heads = (q.shape[how.heads_dim], k.shape[how.heads_dim])
    turned_q, turned_k = wide.split_with_sizes(heads, dim=how.heads_dim)
    return torch.empty_like(q).copy_(turned_q), torch.empty_like(k).copy_(turned_k)


def _rotate_in_blocks(x: Any, cos: torch.Tensor, sin: torch.Tensor, how: _Layout) -> torch.Tensor:
    turned = torch.empty_like(x)
    whole = (x, turned, cos, sin)
    rotary_dim, tokens_dim = cos.shape[-1], 3 - how.heads_dim
    if rotary_dim < x.shape[-1]:
        turned[..., rotary_dim:].copy_(x[..., rotary_dim:])
        whole = (x[..., :rotary_dim], turned[..., :rotary_dim], cos, sin)
    if x.numel() <= _BLOCK_NUMEL:
        _rotate_block(*whole, how)
    else:
        size = max(1, _BLOCK_NUMEL * x.shape[tokens_dim] // x.numel())
        for part, out, c, s in zip(*(t.split(size, dim=tokens_dim) for t in whole), strict=True):
            _rotate_block(part, out, c, s, how)
    return turned


def _rotate_block(
    x: Any, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, how: _Layout
) -> None:
    wide = _upcast(x)
    by_sin = wide * sin
    if wide is x:
        _combine_products(x * cos, by_sin, out, how)
    else:
        _combine_products(wide.mul_(cos), by_sin, wide, how)
        out.copy_(wide)


def _combine_products(by_cos: Any, by_sin: Any, out: torch.Tensor, how: _Layout) -> None:
    """Adds products that have been rounded, as transformers does; `out` may be `by_cos`."""
    first, second = _pairs(by_cos, how.interleaved)
    first_by_sin, second_by_sin = _pairs(by_sin, how.interleaved)
    out_first, out_second = (first, second) if out is by_cos else _pairs(out, how.interleaved)
    sign = -1 if how.conjugate else 1
    torch.sub(first, second_by_sin, alpha=sign, out=out_first)
    torch.add(second, first_by_sin, alpha=sign, out=out_second)


def _pairs(x: torch.Tensor, interleaved: bool) -> Any:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x.split_with_sizes((x.shape[-1] // 2,) * 2, dim=-1)  # quicker than chunk


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
