"""ALiBi: a penalty on the logits that grows with distance (arXiv:2108.12409)."""

from __future__ import annotations

import math

import torch

_COPIES: dict[tuple[int, torch.device], torch.Tensor] = {}


def device_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Return `alibi_slopes` on a device, `[heads]` float64; do not change them.

    They are copied once and kept, because a copy in each forward would wait for the device.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():  # a graph has them as constants
        return alibi_slopes(heads).to(device)
    if (heads, device) not in _COPIES:
        with torch.inference_mode(False):  # else no later training could use them
            _COPIES[heads, device] = alibi_slopes(heads).to(device)
    return _COPIES[heads, device]


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
