"""Biases that fall with distance other than ALiBi's: KERPLE, Sandwich, FIRE, and xPos's factors."""

from __future__ import annotations

import torch

from rope_patch.encodings.sinusoidal import dot_products

Number = float | torch.Tensor  # a tensor is a trained parameter, and sets the result's dtype


def kerple_log(distances: torch.Tensor, weight: Number, rate: Number) -> torch.Tensor:
    """Return -weight ln(1 + rate d): KERPLE's logarithmic bias (arXiv:2205.09921)."""
    return -weight * (rate * _real(distances, rate)).log1p()


def kerple_power(distances: torch.Tensor, weight: Number, exponent: Number) -> torch.Tensor:
    """Return -weight d ** exponent: KERPLE's power bias, exponent in (0, 2]."""
    return -weight * _real(distances, exponent) ** exponent


def sandwich(distances: torch.Tensor, heads: int, width: int = 128) -> torch.Tensor:
    """Return Sandwich's bias, `[heads, N]` (arXiv:2212.10356).

    The dot product of two sinusoidal encodings, less its value at distance 0. For head h = 1, 2,
    ... it is divided by 8 h / heads.
    """
    fall = dot_products(distances, width) - width // 2
    scale = torch.arange(1, heads + 1, dtype=torch.float64, device=fall.device) * 8 / heads
    return fall / scale[:, None]


def fire_progress(
    queries: torch.Tensor, keys: torch.Tensor, rate: Number, threshold: Number
) -> torch.Tensor:
    """Return what FIRE's network is given: the distance as a share of the query's (2310.04418).

    psi(i - j) / psi(max(threshold, i)) with psi(x) = ln(rate x + 1).
    """
    near = (rate * _real(queries - keys, rate)).log1p()
    return near / (rate * _real(queries, rate).clamp(min=threshold)).log1p()


def xpos_factors(
    distances: torch.Tensor, width: int, gamma: float = 0.4, scale: float = 512.0
) -> torch.Tensor:
    """Return how much of each pair is left at a distance, `[N, width // 2]` (arXiv:2212.10554)."""
    k = torch.arange(width // 2, dtype=torch.float64, device=distances.device)
    zeta = (2 * k / width + gamma) / (1 + gamma)
    return zeta ** (distances.double()[:, None] / scale)


def _real(numbers: torch.Tensor, parameter: Number) -> torch.Tensor:
    """Return numbers in a parameter's dtype, in float64 beside a plain float."""
    return numbers.to(parameter.dtype if isinstance(parameter, torch.Tensor) else torch.float64)
