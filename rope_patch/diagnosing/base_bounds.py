"""How large a rope base has to be for a length: what two papers derive, computed in float64."""

from __future__ import annotations

import functools
import math

import torch

MAX_LENGTH = 2**20  # tokens; these take seconds already

_BASE_RATIO = 1.003  # between bases that are tried; the paper's values come out at such steps only
_MAX_BASE = 1e12
_BLOCK = 512  # distances in one block of the product of angles


def failing_distance(inv_freq: torch.Tensor, length: int, near: int = 0) -> int | None:
    """A distance at which a similar key is expected to score less than a random one.

    That is where sum_i cos(m f_i) < 0 (Men et al. 2024, arXiv:2405.14591, theorem 1: queries and
    keys with independent, equally distributed components).

    Args:
        inv_freq: Radians per token of each pair, `[R / 2]`.
        length: The largest distance m, in tokens.
        near: Where to look first.

    Returns:
        The distance; None where there is none up to the length.
    """
    f = inv_freq.double().cpu()
    if near:
        around = 16 + near // 250
        m = torch.arange(max(0, near - around), min(length, near + around) + 1, device="cpu")
        sums = torch.outer(m.double(), f).cos().sum(-1)
        if float(sums.min()) < -1e-9:
            return int(m[sums.argmin()])
    # cos((c + r) f) = cos(c f) cos(r f) - sin(c f) sin(r f): all distances in one matrix product.
    r = torch.outer(f, torch.arange(_BLOCK, dtype=torch.float64, device="cpu"))
    right = torch.cat([r.cos(), -r.sin()])
    first, count = 0, 1
    while first <= length:
        last = min(first + count * _BLOCK, (length // _BLOCK + 1) * _BLOCK)
        c = torch.outer(torch.arange(first, last, _BLOCK, dtype=torch.float64, device="cpu"), f)
        sums = (torch.cat([c.cos(), c.sin()], dim=1) @ right).flatten()[: length + 1 - first]
        if float(sums.min()) < -1e-9:
            return first + int(sums.argmin())
        first, count = last, min(4 * count, 512)  # short distances mostly decide
    return None


@functools.lru_cache(maxsize=64)
def base_bound(rotary_dim: int, length: int) -> float | None:
    """The smallest base whose attention still tells similar tokens from random ones at a length.

    "Base of RoPE bounds context length" (Men et al. 2024, arXiv:2405.14591): below it a
    model trained to the length may have a fine perplexity and not retrieve. Bases 0.3% apart are
    tried from small to large. Just above the first that holds there are some that do not, so this
    is a bound and no recommendation.

    Args:
        rotary_dim: Dimensions of a head that rotate.
        length: Tokens.

    Returns:
        The base; None where no base up to 1e12 does it (one or two pairs never do), or the length
        is above `MAX_LENGTH`.
    """
    if length > MAX_LENGTH:
        return None
    exponent = -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    base, fails = 2.0, 0
    while base < _MAX_BASE:
        found = failing_distance(base**exponent, length, fails)
        if found is None:
            return base
        # The next base fails nearby, mostly.
        base, fails = base * _BASE_RATIO, found
    return None


def critical_base(theta: float, trained_length: int, length: int) -> float | None:
    """The base whose critical pair takes the target length for the turn it took training's.

    Liu et al. 2023, arXiv:2310.05209, theorem 2: theta^(ln(length / 2 pi) / ln(trained / 2 pi)).

    Args:
        theta: The model's base.
        trained_length: Tokens.
        length: Target length in tokens.

    Returns:
        The base; None where no pair turns once within the trained length.
    """
    trained = trained_length / (2 * math.pi)
    if trained <= 1:
        return None
    return theta ** (math.log(max(length, trained_length) / (2 * math.pi)) / math.log(trained))
