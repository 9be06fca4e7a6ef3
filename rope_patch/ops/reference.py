"""The rotation in plain torch: what every faster form of it has to equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rope_patch.ops.angles import cos_sin

_CHUNK_TOKENS = 4096  # rotated at once: what is in float32 meanwhile stays small beside the cache

# Bits of float32's mantissa that a narrower type has no room for.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13}


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotates the leading dimensions of each head (RoFormer, arXiv:2104.09864, equation 34).

    Args:
        x: Queries or keys, `[..., D]`.
        cos: One number for each rotated pair, `[..., R / 2]`, broadcast against `x`.
        sin: The same.
        interleaved: Whether a pair is two neighbours (GPT-J, Cohere) rather than the same place in
            both halves of the rotated dimensions (Llama, GPT-NeoX).

    Returns:
        `[..., D]` in `x`'s dtype; computed in float32 at least and rounded once. Dimensions beyond
        the first R are as they were.
    """
    rotary_dim = 2 * cos.shape[-1]
    turned = _rotate_pairs(x[..., :rotary_dim], cos, sin, interleaved)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
    conjugate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates queries and keys to their positions, by exact angles; see `rope_patch.ops.rope`.

    Args:
        q: Queries, `[B, S, H, D]`.
        k: Keys, `[B, S, K, D]`, if any.
        positions: See `rope_patch.ops.angles.cos_sin`.
        packed_freqs: See `rope_patch.ops.angles.make_turns`.
        sections: See `rope_patch.ops.angles.cos_sin`.
        interleaved: See `rotate`.
        heads_dim: Where the heads are: 2, or 1 for `[B, H, S, D]`.
        conjugate: Rotate backwards, as gradients are.

    Returns:
        Both, rotated, in their dtypes.
    """
    cos, sin = (c.unsqueeze(heads_dim) for c in cos_sin(positions, packed_freqs, sections))
    sin = -sin if conjugate else sin
    turned = (None if x is None else rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return next(turned), next(turned)  # type: ignore[return-value]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0, heads_dim: int = 2
) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) of heads, rounded once.

    Args:
        x: Queries or keys, `[B, S, H, D]`.
        weight: `[D]` where each head is normed by itself (Qwen 3, Gemma 3), `[H, D]` where all
            heads of a token are together (OLMo 2).
        eps: Added to the mean of squares.
        offset: Added to the weight; 1 for Gemma.
        heads_dim: See `rope`.

    Returns:
        As `x`, in float32 at least.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [-1] if weight.ndim == 1 else [-1, heads_dim]
    normed = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    scale = weight.to(wide.dtype) + offset
    if weight.ndim == 2 and heads_dim == 1:
        scale = scale[:, None]
    return normed * scale


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of queries and keys, then `rope`, rounded once; see `rms_norm` for the arguments."""
    normed = (
        rms_norm(x, weight, eps=eps, offset=offset, heads_dim=heads_dim)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    given: Any = {"sections": sections, "interleaved": interleaved, "heads_dim": heads_dim}
    turned_q, turned_k = rope(next(normed), next(normed), positions, packed_freqs, **given)
    assert turned_k is not None
    return turned_q.to(q.dtype), turned_k.to(k.dtype)


@torch.no_grad()
def rerotate_(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Turns rotated keys on, in place and exactly; see `rope_patch.ops.rerotate_`.

    Keys in 16 bits are rounded up as often as they are far from the lower neighbour: so they do not
    drift over many changes, where rounding to the nearest would undo a small turn each time anew.

    Args:
        layers: Keys of one layer or of several on one device, `[B, K, S, D]` each, of which the
            first R dimensions of each head are rotated.
        positions: Tokens, `[B, S]` or `[S]`.
        packed_freqs: What to turn them on by, `[R / 2 + 1]` or `[B, R / 2 + 1]`; see
            `turns_between`.
        interleaved: See `rotate`.
    """
    for piece in _chunks(positions):
        cos, sin = (c[:, None] for c in cos_sin(positions[..., piece], packed_freqs))
        _rotate_layers_(layers, piece, cos, sin, interleaved)


@torch.no_grad()
def rerotate_as_transformers_(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    scale: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """`rerotate_` for keys that were rotated by transformers' own angles, products in float32.

    The result is what rotating afresh would have given, but for one rounding to the keys' dtype.
    Differences are taken in float64, so angles do not drift either.

    Args:
        layers: See `rerotate_`.
        positions: Tokens, `[B, S]`.
        old: Frequencies that the keys were rotated by, radians per token, `[B, R / 2]`.
        new: Those to rotate them by.
        scale: New attention factor / old one, `[B]`.
        interleaved: See `rotate`.
    """
    device = layers[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64  # all that mps has
    was, becomes = (f.to(device, torch.float32)[:, None] for f in (old, new))
    factor = scale.to(device, wide)[:, None, None]
    for piece in _chunks(positions):
        at = positions[:, piece].to(device, torch.float32)[..., None]
        angle = (at * becomes).to(wide) - (at * was).to(wide)
        cos, sin = ((f(angle) * factor).float()[:, None] for f in (torch.cos, torch.sin))
        _rotate_layers_(layers, piece, cos, sin, interleaved)


def _chunks(positions: torch.Tensor) -> Iterator[slice]:
    for start in range(0, positions.shape[-1], _CHUNK_TOKENS):
        yield slice(start, start + _CHUNK_TOKENS)


def _rotate_layers_(
    layers: Sequence[torch.Tensor],
    piece: slice,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    for keys in layers:
        part = keys[:, :, piece, : 2 * cos.shape[-1]]
        part.copy_(_stochastic_round(_rotate_pairs(part, cos, sin, interleaved), keys.dtype))


def _rotate_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def _stochastic_round(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds float32 up or down by a chance that makes the mean exact (stochastic rounding).

    The chance is a hash of the number itself, so the same key always becomes the same.
    """
    spare = _SPARE_BITS.get(dtype)
    if spare is None:
        return x.to(dtype)
    bits = x.view(torch.int32)
    chance = (bits ^ (bits >> 15)) * -1640531535  # wraps around; the golden ratio mixes well
    chance = (chance ^ (chance >> 13)) * -2048144777
    up = bits + ((chance >> 7) & (2**spare - 1))
    return (up & -(2**spare)).view(torch.float32).to(dtype)
