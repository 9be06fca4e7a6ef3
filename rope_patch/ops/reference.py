"""The rotation in plain torch: what every faster form of it has to equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SLOTS = 4096  # rotated at once: what is in float32 meanwhile stays small beside the cache

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
    turned = _turned(x[..., :rotary_dim], cos, sin, interleaved)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)


@torch.no_grad()
def rerotate_(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    scale: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Takes rotated keys from one set of frequencies to another, in place.

    A key at position p that was turned by old * p is turned on by the difference of the angles. The
    angles are those that transformers rotates by, products in float32, so that the result is what
    rotating afresh would have given, but for one rounding to the keys' dtype. Differences are taken
    in float64, and keys in 16 bits are rounded up as often as they are far from the lower
    neighbour: so neither angles nor keys drift over many changes, where rounding to the nearest
    would undo a small turn each time anew.

    Args:
        layers: Keys of one layer or of several on one device, `[B, K, S, D]` each, of which the
            first R dimensions of each head are rotated.
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
    for start in range(0, positions.shape[1], _SLOTS):
        piece = slice(start, start + _SLOTS)
        at = positions[:, piece].to(device, torch.float32)[..., None]
        angle = (at * becomes).to(wide) - (at * was).to(wide)
        cos, sin = ((f(angle) * factor).float()[:, None] for f in (torch.cos, torch.sin))
        for keys in layers:
            part = keys[:, :, piece, : 2 * old.shape[-1]]
            part.copy_(_round_fairly(_turned(part, cos, sin, interleaved), keys.dtype))


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def _round_fairly(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
