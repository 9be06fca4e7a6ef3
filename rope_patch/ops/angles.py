"""Angles that are exact at any position: fractions of a turn in 64-bit integers.

A position times a frequency in float32 is off by 0.004 radians at 128k tokens and by half a radian
at 10M. Whole turns do not matter, though: with a frequency counted in 2^-64 turns a token, the
product that wraps around is the angle, to the last bit, at every position.

Positions and turns are also what travels through a model in the place of cos and sin. Both are
integers, so nothing that casts what is floating (autocast, FSDP's mixed precision, `.bfloat16()`)
can touch them.
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
    """What kernels rotate by: frequencies as integers, and the attention factor.

    Args:
        inv_freq: Radians per token, `[R / 2]`, or `[B, R / 2]` with others for each row. Rounded to
            float32 first, as transformers holds them, and exact from there on.
        attention_factor: Multiplier of cos and sin; a number, or one for each row, `[B]`.

    Returns:
        int64 `[..., R / 2 + 1]`: 2^-64 turns per token, and last the bits of the factor in float32.
    """
    at_home = inv_freq.cpu() if inv_freq.device.type == "mps" else inv_freq  # it has no float64
    x = at_home.float().double()
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
    """cos and sin of each token and pair, times the attention factor.

    Args:
        positions: Tokens, `[S]` or `[B, S]`; `[A, B, S]` where a token has a position on each of A
            axes (M-RoPE, arXiv:2409.12191).
        packed_freqs: See `pack_frequencies`, `[R / 2 + 1]` or `[B, R / 2 + 1]`.
        sections: Which axis each pair turns by, `[R / 2]`; only with `[A, B, S]`.

    Returns:
        Two tensors in float32, `[B, S, R / 2]`, B being 1 where nothing differs between rows.
    """
    if sections is not None:
        at = positions.to(torch.int64)[sections.long()].permute(1, 2, 0)
    else:
        at = positions.to(torch.int64)[..., None]
    rows = packed_freqs.reshape(-1, 1, packed_freqs.shape[-1])
    phase = at * rows[..., :-1]
    if phase.ndim == 2:
        phase = phase[None]
    # Only the part within half a turn of zero is left, so float32 holds the angle well.
    wide = torch.float32 if phase.device.type == "mps" else torch.float64
    angle = phase.to(wide) * (2 * math.pi / _UNITS_PER_TURN)
    factor = rows[..., -1:].to(torch.int32).view(torch.float32)
    return angle.cos().float() * factor, angle.sin().float() * factor


def rerotation_frequencies(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What takes keys that were rotated by `old` on to `new`, exactly; see `pack_frequencies`."""
    factors = [t[..., -1].to(torch.int32).view(torch.float32) for t in (old, new)]
    bits = (factors[1] / factors[0]).view(torch.int32).to(torch.int64)
    return torch.cat([new[..., :-1] - old[..., :-1], bits[..., None]], dim=-1)
