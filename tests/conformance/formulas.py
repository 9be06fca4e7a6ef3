"""Compute the methods' formulas in plain Python floats, from the papers, without rope_patch.

`at` is any object with `head_dim`, `rotary_dim`, `theta` and `trained_length`. A rotation is a
list of radians per token of each pair, and the multiplier of cos and sin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Rotation = tuple[list[float], float]


def default(at: Any, theta: float | None = None) -> Rotation:
    """Return RoFormer's rotation, arXiv:2104.09864 section 3.2.2."""
    base, size = theta or at.theta, at.rotary_dim
    return [base ** (-2 * i / size) for i in range(size // 2)], 1.0


def linear(at: Any, factor: float) -> Rotation:
    """Return Position Interpolation, arXiv:2306.15595 equation 4."""
    return [frequency / factor for frequency in default(at)[0]], 1.0


def ntk(at: Any, factor: float) -> Rotation:
    """Return NTK-aware scaling, arXiv:2309.00071 definition 1, for each pair."""
    size = at.rotary_dim
    plain, _ = default(at)
    return [plain[i] * factor ** (-2 * i / (size - 2)) for i in range(size // 2)], 1.0


def critical_base(at: Any, factor: float) -> float:
    """Return the theta that stretches the critical pair by the factor: arXiv:2310.05209."""
    slowest = at.trained_length / (2 * math.pi)
    return math.exp(math.log(at.theta) * math.log(factor * slowest) / math.log(slowest))


def pair_index(at: Any, rotations: float) -> float:
    """Return the fractional pair with so many rotations: arXiv:2309.00071 equation 14, solved."""
    wavelength = at.trained_length / rotations
    return at.rotary_dim / 2 * math.log(wavelength / (2 * math.pi), at.theta)


def ramp(at: Any, low: float, high: float) -> list[float]:
    """Return 0 up to pair `low`, 1 from pair `high` on, and a line in between."""
    if low == high:
        high += 0.001
    return [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(at.rotary_dim // 2)]


def ramp_ends(
    at: Any, fast: float, slow: float, truncate: bool = True, top: int | None = None
) -> tuple[float, float]:
    """Return the ramp's ends as in the YaRN authors' code."""
    low, high = pair_index(at, fast), pair_index(at, slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, at.rotary_dim - 1 if top is None else top)


def blend(at: Any, factor: float, share: Sequence[float]) -> list[float]:
    """Interpolate each pair's frequency by its share: arXiv:2309.00071 equation 25."""
    plain, _ = default(at)
    return [f * (1 - s + s / factor) for f, s in zip(plain, share, strict=True)]


def yarn_attention_factor(factor: float, mscale: float = 1.0, slope: float = 0.1) -> float:
    """Return YaRN's attention factor, arXiv:2309.00071 equation 22."""
    return slope * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def yarn(
    at: Any, factor: float, fast: float = 32, slow: float = 1, truncate: bool = True
) -> Rotation:
    """Return YaRN as in its authors' code."""
    return blend(at, factor, ramp(at, *ramp_ends(at, fast, slow, truncate))), yarn_attention_factor(
        factor
    )


def yarn_by_rotations(at: Any, factor: float, fast: float = 32, slow: float = 1) -> Rotation:
    """Return YaRN with the ramp over rotations, arXiv:2309.00071 equation 18."""
    plain, _ = default(at)
    rotations = [at.trained_length * f / (2 * math.pi) for f in plain]
    shares = [1 - min(max((n - slow) / (fast - slow), 0.0), 1.0) for n in rotations]
    return blend(at, factor, shares), yarn_attention_factor(factor)


def by_parts_2023_06(at: Any, factor: float) -> Rotation:
    """Return jquesnelle/yarn's LlamaPartNTKScaledRotaryEmbedding.py, which has two ramps."""
    plain, stretched = default(at)[0], ntk(at, factor)[0]
    first, second = ramp(at, *ramp_ends(at, 1.25, 0.75)), ramp(at, *ramp_ends(at, 16, 2))
    mixed = [n * (1 - s) + f / factor * s for n, f, s in zip(stretched, plain, first, strict=True)]
    return [f * (1 - s) + m * s for f, m, s in zip(plain, mixed, second, strict=True)], 1.0


def llama3(at: Any, factor: float, low: float = 1, high: float = 4) -> Rotation:
    """Return Meta's apply_scaling, arXiv:2407.21783, by wavelength."""
    scaled = []
    for frequency in default(at)[0]:
        wavelength = 2 * math.pi / frequency
        if wavelength < at.trained_length / high:
            scaled.append(frequency)
        elif wavelength > at.trained_length / low:
            scaled.append(frequency / factor)
        else:
            smooth = (at.trained_length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled, 1.0


def longrope(at: Any, factor: float, stretch: Sequence[float]) -> Rotation:
    """Return LongRoPE, arXiv:2402.13753, with the attention factor of its code ("su")."""
    plain, _ = default(at)
    attention_factor = (
        math.sqrt(1 + math.log(factor) / math.log(at.trained_length)) if factor > 1 else 1.0
    )
    return [f / s for f, s in zip(plain, stretch, strict=True)], attention_factor


def clipped(rotation: Rotation, count: int) -> Rotation:
    """Return a rotation with its slowest pairs clipped as in CoPE, arXiv:2602.05258."""
    inv_freq, attention_factor = rotation
    first = len(inv_freq) - count
    cosines = [math.cos(math.pi * k / (count - 1)) for k in range(count)]
    clipped_pairs = [inv_freq[first + k] * 0.5 * (1 + cosines[k]) for k in range(count - 1)]
    return [*inv_freq[:first], *clipped_pairs, 0.0], attention_factor


def proportional(at: Any, share: float) -> Rotation:
    """Return p-RoPE, arXiv:2410.06205: exponents over whole heads; the last pairs do not rotate."""
    plain, _ = default(at)
    rotating = int(share * at.rotary_dim // 2)
    return [f if i < rotating else 0.0 for i, f in enumerate(plain)], 1.0
