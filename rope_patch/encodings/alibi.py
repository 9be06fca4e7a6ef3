"""ALiBi: a penalty on the logits that grows with distance (arXiv:2108.12409)."""

from __future__ import annotations

import math

import torch


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return each head's slope, `[heads]` float64.

    Powers of two have a geometric sequence from 2 ** (-8 / heads) to 2 ** -8. Other numbers add
    every other slope of the next power, as the paper's code does.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    finer = [2.0 ** (-4 * head / power) for head in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes + finer[: heads - power], dtype=torch.float64)


def linear_slopes(slopes: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return slopes divided by a factor: the interpolation of arXiv:2310.13017."""
    return slopes / factor


def ntk_slopes(slopes: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return slopes of which the steepest stays and the flattest is divided by a factor.

    Those between follow the logarithm of their slope, so near distances stay and far ones shrink
    (github.com/keezen/ntk_alibi, which knows powers of two alone).
    """
    logs = slopes.log()
    spread = logs.max() - logs.min()
    # One head has no spread and gets the whole factor; `where` keeps compiled graphs whole.
    rank = torch.where(spread > 0, (logs.max() - logs) / spread.clamp(min=1e-9), 1.0)
    return slopes * factor**-rank


def alibi_bias(slopes: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Return what is added to the logits at distances, `[heads, ...]`."""
    return -slopes.view(-1, *[1] * distances.ndim) * distances.abs()
