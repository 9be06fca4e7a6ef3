"""Run the public ops in plain torch, where the kernels do not run: by device, dtype or mode.

On a CPU, `rope_from_cos_sin` rotates without large temporaries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rope_patch.ops import reference
from rope_patch.ops.angles import cos_sin
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.ops.reference import rotate
from rope_patch.ops.validation import validate_shapes


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    inplace: bool,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate as `rope_patch.ops.rope` does."""
    require_torch_backend(kernels)
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim)
    layout: Any = {"interleaved": interleaved, "heads_dim": heads_dim}
    if kernels == "auto":  # faster on a CPU, and the same as the reference elsewhere
        cos, sin = cos_sin(positions, packed_freqs, sections)
        rotated = rope_from_cos_sin(q, k, cos, sin, repeated=False, may_overwrite=inplace, **layout)
    else:
        rotated = reference.rope(q, k, positions, packed_freqs, sections=sections, **layout)
    return copy_inplace(q, k, *rotated) if inplace else rotated


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    eps: float,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    inplace: bool,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate as `rope_patch.ops.qk_norm_rope` does."""
    require_torch_backend(kernels)
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, q_weight, k_weight)
    rotated = reference.qk_norm_rope(
        q, k, q_weight, k_weight, positions, packed_freqs, eps=eps, offset=offset,
        sections=sections, interleaved=interleaved, heads_dim=heads_dim,
    )  # fmt: skip
    return copy_inplace(q, k, *rotated) if inplace else rotated


def copy_inplace(
    q: torch.Tensor, k: Any, rotated_q: torch.Tensor, rotated_k: torch.Tensor | None
) -> tuple[torch.Tensor, Any]:
    """Copy results into queries and keys, unless they are there already."""
    if rotated_q is not q:
        q.copy_(rotated_q)
    if k is not None and rotated_k is not None and rotated_k is not k:
        k.copy_(rotated_k)
    return q, k


def require_torch_backend(kernels: str) -> None:
    """Raise if `kernels` names neither plain torch nor a free choice."""
    if kernels not in ("auto", "reference"):
        raise ValueError(f'kernels must be "auto", "reference" or "triton" here, got {kernels!r}')


# Elements rotated at once. Temporaries of this size stay in the cache, where those of a whole
# tensor would pass through memory several times.
_BLOCK_NUMEL = 2**18

# Up to this many elements, which torch leaves to one thread, calls dominate the cost: queries and
# keys are joined and rotated at once.
_JOINED_NUMEL = 2**15

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, type(None)}


class _Layout(NamedTuple):
    interleaved: bool
    heads_dim: int
    conjugate: bool = False  # rotate backwards, as for gradients
    wide: bool = True  # compute in float32 and round once


def rope_from_cos_sin(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
    repeated: bool = True,
    may_overwrite: bool = False,
    wide: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys by the cos and sin of a transformers rotary module.

    In float32, and with `wide=False` in 16 bits, the result equals transformers' own
    `apply_rotary_pos_emb` to the bit.

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
        may_overwrite: Whether nothing reads q and k afterwards. Large ones are then overwritten
            where they need no gradient, which saves the page faults of fresh memory.
        wide: Whether to compute in float32 or wider, and to round once. If not, each product and
            the sum are rounded to the dtype of q and cos, as transformers' most functions do.

    Returns:
        Both, in their dtypes and memory layouts, or q and k themselves if overwritten. Dimensions
        beyond the first R keep their values.
    """
    if needs_reference(q, k, cos, sin):
        layout = _Layout(interleaved, heads_dim)
        pairs = (_pairs(c, layout)[0] if repeated else c for c in (cos, sin))
        cos, sin = (c.unsqueeze(heads_dim) for c in pairs)
        rotated_q = rotate(q, cos, sin, interleaved=interleaved)
        return rotated_q, None if k is None else rotate(k, cos, sin, interleaved=interleaved)
    if not repeated:
        dim = -1 if interleaved else -2
        cos, sin = (torch.stack((c, c), dim).flatten(-2) for c in (cos, sin))
    layout = _Layout(interleaved, heads_dim, wide=wide)
    if may_overwrite and not (torch.is_grad_enabled() and _requires_grad(q, k)):
        return _rotate_both(q, k, cos, sin, layout, may_overwrite=True)
    return _rotate_differentiably(q, k, cos, sin, layout)


def needs_reference(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return whether only plain torch without `out=` can rotate these tensors."""
    return (
        torch.compiler.is_compiling()
        or needs_plain_torch()
        or not {type(q), type(k), type(cos), type(sin)} <= _PLAIN_TYPES
        or not q.is_cpu
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def _rotate_differentiably(q: Any, k: Any, *rest: Any) -> Any:
    if torch.is_grad_enabled() and _requires_grad(q, k):
        return _RotationFunction.apply(q, k, *rest)
    return _rotate_both(q, k, *rest)


def _requires_grad(q: Any, k: Any) -> bool:
    return (q is not None and q.requires_grad) or (k is not None and k.requires_grad)


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


def _rotate_both(
    q: Any,
    k: Any,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: _Layout,
    *,
    may_overwrite: bool = False,
) -> Any:
    cos, sin = cos.unsqueeze(layout.heads_dim), sin.unsqueeze(layout.heads_dim)
    if q is not None and k is not None and q.numel() + k.numel() <= _JOINED_NUMEL:
        return _rotate_joined(q, k, cos, sin, layout)
    if layout.wide:
        cos, sin = _upcast(cos), _upcast(sin)
    rotated = [
        x if x is None or (may_overwrite and not _is_joined_anew(x, cos)) else _output(x, cos)
        for x in (q, k)
    ]
    for x, out in zip((q, k), rotated, strict=True):
        if x is not None and x.numel() and cos.numel():
            _rotate_into(out, x, cos, sin, layout)
    return tuple(rotated)


def _rotate_joined(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, layout: _Layout) -> Any:
    wide = torch.cat((q, k), dim=layout.heads_dim)
    wide = _upcast(wide) if layout.wide else wide
    part = wide if cos.shape[-1] == wide.shape[-1] else wide[..., : cos.shape[-1]]
    by_sin = part * sin
    _add_products(_pairs(part.mul_(cos), layout), _pairs(by_sin, layout), layout)
    heads = (q.shape[layout.heads_dim], k.shape[layout.heads_dim])
    rotated_q, rotated_k = wide.split_with_sizes(heads, dim=layout.heads_dim)
    return _output(q, cos).copy_(rotated_q), _output(k, cos).copy_(rotated_k)


def _output(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Return memory for a rotated tensor, laid out as transformers' code lays it out."""
    if _is_joined_anew(x, cos):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x)


def _is_joined_anew(x: torch.Tensor, cos: torch.Tensor) -> bool:
    """Return whether transformers' code changes the layout of a tensor that it rotates."""
    # Transformers' code joins the part of a head that rotates and the rest. SDPA rounds otherwise
    # where the numbers of a head do not lie side by side (Zaya).
    return cos.shape[-1] < x.shape[-1] and x.stride(-1) != 1


def _rotate_into(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: _Layout
) -> None:
    """Rotate x into `out`, which may be x, block by block."""
    rotary_dim, tokens_dim = cos.shape[-1], 3 - layout.heads_dim
    part, part_out = x, out
    if rotary_dim < x.shape[-1]:
        part, part_out = x[..., :rotary_dim], out[..., :rotary_dim]
        if out is not x:
            out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    tokens = x.shape[tokens_dim]
    size = min(tokens, max(1, _BLOCK_NUMEL * tokens // part.numel()))
    dtype = torch.promote_types(x.dtype, cos.dtype)
    # All blocks share the temporaries: fresh memory for each would cost page faults.
    by_sin = torch.empty_like(part.narrow(tokens_dim, 0, size), dtype=dtype)
    wide = by_sin if dtype == x.dtype else torch.empty_like(by_sin)
    temporaries = (wide, by_sin, *_pairs(wide, layout), *_pairs(by_sin, layout))
    whole = (part, part_out, *_pairs(part_out, layout), cos, sin)
    for source, target, first, second, c, s in zip(
        *(t.split(size, dim=tokens_dim) for t in whole), strict=True
    ):
        count = source.shape[tokens_dim]
        if count < size:
            temporaries = tuple(t.narrow(tokens_dim, 0, count) for t in temporaries)
        wide, by_sin, wide_first, wide_second, first_by_sin, second_by_sin = temporaries
        by_sin_pairs = (first_by_sin, second_by_sin)
        if dtype == x.dtype:
            torch.mul(source, s, out=by_sin)
            torch.mul(source, c, out=target)
            _add_products((first, second), by_sin_pairs, layout)
        else:
            torch.mul(wide.copy_(source), s, out=by_sin)
            wide.mul_(c)
            _add_products((wide_first, wide_second), by_sin_pairs, layout)
            target.copy_(wide)


def _add_products(by_cos: Any, by_sin: Any, layout: _Layout) -> None:
    """Add rounded products to those by cos, as transformers does."""
    sign = -1 if layout.conjugate else 1
    by_cos[0].sub_(by_sin[1], alpha=sign)
    by_cos[1].add_(by_sin[0], alpha=sign)


def _pairs(x: torch.Tensor, layout: _Layout) -> Any:
    """Return the first and the second dimensions of all pairs, as views."""
    if layout.interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x.split_with_sizes((x.shape[-1] // 2,) * 2, dim=-1)  # faster than chunk


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()  # quicker than `to` for one token
