"""Packed frequencies: angles that are exact at any position, in 64-bit integers.

A position times a frequency in float32 is off by 0.004 radians at 128k tokens and by half a radian
at 10M. Whole turns do not change an angle, so frequencies are packed as integers in units of 2^-64
turns a token. The product with a position then wraps around to the angle, to the last bit.

Models with our kernels pass positions and packed frequencies through their layers instead of cos
and sin. Both are integers, so casts of floating-point tensors (autocast, FSDP's mixed precision,
`.bfloat16()`) leave them alone.
"""

from __future__ import annotations

import math

import torch

_UNITS_PER_TURN = 2.0**64

# 2^64 / 2 pi, the first 29 bits and the rest.
_UNITS_PER_RADIAN_HIGH = 341782637.0 * 2**33
_UNITS_PER_RADIAN_LOW = 6770722122.4962435


def pack_frequencies(
    inv_freq: torch.Tensor, attention_factor: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Pack frequencies and the attention factor into one integer tensor.

    Args:
        inv_freq: Radians per token, `[R / 2]`, or `[B, R / 2]` for one set a row. Rounded to
            float32, the precision of transformers, and exact from there on.
        attention_factor: Multiplier of cos and sin; a number, or one for each row, `[B]`.

    Returns:
        int64 `[..., R / 2 + 1]`: units of 2^-64 turns per token, then the float32 bits of the
        attention factor.
    """
    on_float64_device = inv_freq.cpu() if inv_freq.device.type == "mps" else inv_freq
    x = on_float64_device.float().double()
    # 2^64 / 2 pi in two parts: 24 bits of frequency times 29 of the first are exact in 53.
    high = x * _UNITS_PER_RADIAN_HIGH
    whole = high.floor()
    rest = (high - whole + x * _UNITS_PER_RADIAN_LOW).round().to(torch.int64)
    upper = (whole / 2**32).floor()
    lower = whole - upper * 2**32
    integers = (upper.to(torch.int64) << 32) + lower.to(torch.int64) + rest
    factor = torch.as_tensor(attention_factor, dtype=torch.float32, device=inv_freq.device)
    bits = factor.expand(inv_freq.shape[:-1]).contiguous().view(torch.int32).to(torch.int64)
    return torch.cat([integers.to(bits.device), bits[..., None]], dim=-1)


def cos_sin(
    positions: torch.Tensor, packed_freqs: torch.Tensor, sections: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of each token and pair, times the attention factor.

    Args:
        positions: Token positions, `[S]` or `[B, S]`; `[A, B, S]` if a token has a position on each
            of A axes (M-RoPE, arXiv:2409.12191).
        packed_freqs: See `pack_frequencies`, `[R / 2 + 1]` or `[B, R / 2 + 1]`.
        sections: The axis that each pair rotates by, `[R / 2]`; only with `[A, B, S]`.

    Returns:
        Two tensors in float32, `[B, S, R / 2]`; B is 1 if all rows are equal.
    """
    if sections is not None:
        pair_positions = positions.to(torch.int64)[sections.long()].permute(1, 2, 0)
    else:
        pair_positions = positions.to(torch.int64)[..., None]
    rows = packed_freqs.reshape(-1, 1, packed_freqs.shape[-1])
    phase = pair_positions * rows[..., :-1]
    if phase.ndim == 2:
        phase = phase[None]
    # The angle lies within half a turn of zero, so float32 represents it well.
    float_dtype = torch.float32 if phase.device.type == "mps" else torch.float64
    angle = phase.to(float_dtype) * (2 * math.pi / _UNITS_PER_TURN)
    factor = rows[..., -1:].to(torch.int32).view(torch.float32)
    return angle.cos().float() * factor, angle.sin().float() * factor


def rerotation_frequencies(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the packed frequencies that re-rotate keys exactly from `old` to `new`.

    Args:
        old: Packed frequencies of the keys; see `pack_frequencies`.
        new: Packed frequencies to rotate them to.
    """
    factors = [t[..., -1].to(torch.int32).view(torch.float32) for t in (old, new)]
    bits = (factors[1] / factors[0]).view(torch.int32).to(torch.int64)
    return torch.cat([new[..., :-1] - old[..., :-1], bits[..., None]], dim=-1)
