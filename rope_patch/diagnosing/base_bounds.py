"""Lower bounds on the RoPE base for a length, after two papers, in float64."""

from __future__ import annotations

import functools
import math

import torch

MAX_LENGTH = 2**20  # tokens; takes seconds

_BASE_RATIO = 1.003  # between tested bases; only such steps reproduce the paper's values
_MAX_BASE = 1e12
_BLOCK = 512  # distances per block of the matrix product
_AT_ONCE = 16  # bases tested together
# A base 1% above a failing one is tested at that one's distance, and up to 1% beyond it.
_SLOPES = torch.linspace(0, 1, 9, dtype=torch.float64, device="cpu")


def failing_distance(inv_freq: torch.Tensor, length: int, near: int = 0) -> int | None:
    """Return a distance at which a similar key is expected to score below a random one.

    There sum_i cos(m f_i) < 0 (Men et al. 2024, arXiv:2405.14591, theorem 1: queries and
    keys with independent, equally distributed components).

    Args:
        inv_freq: Radians per token of each pair, `[R / 2]`.
        length: The largest distance m, in tokens.
        near: Distance to test first.

    Returns:
        The distance; None if there is none up to the length.
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
    """Return the smallest base whose attention separates similar from random tokens at a length.

    "Base of RoPE bounds context length" (Men et al. 2024, arXiv:2405.14591): below it a
    model trained to the length may have a fine perplexity and not retrieve. Bases 0.3% apart are
    tested from small to large. Some bases just above the first success fail again, so this is a
    bound, not a recommendation.

    Args:
        rotary_dim: Rotated dimensions of a head.
        length: Length in tokens.

    Returns:
        The base; None if no base up to 1e12 works (one or two pairs never do), or the length is
        above `MAX_LENGTH`.
    """
    if length > MAX_LENGTH:
        return None
    exponent = -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    bases = [2.0]
    while (base := bases[-1] * _BASE_RATIO) < _MAX_BASE:
        bases.append(base)
    first, near = 0, 0
    while first < len(bases):
        distance = failing_distance(bases[first] ** exponent, length, near)
        if distance is None:
            return bases[first]
        first, near = first + 1, distance
        # The next bases mostly fail nearby. A negative sum at any distance is proof, so that many
        # bases are tested at once at few distances; only one without is tested at all of them.
        while near and first < len(bases):
            some = torch.tensor(bases[first : first + _AT_ONCE], dtype=torch.float64, device="cpu")
            stretches = torch.outer(some / bases[first - 1] - 1, _SLOPES) + 1
            m = (near * stretches).round().clamp(max=length)
            sums = (m[..., None] * some[:, None, None] ** exponent).cos().sum(-1)
            lowest, at = sums.min(dim=1)
            passed = int((lowest < -1e-9).long().cumprod(0).sum())
            if passed:
                first, near = first + passed, int(m[passed - 1, at[passed - 1]])
            if passed < _AT_ONCE:
                break
    return None


def critical_base(theta: float, trained_length: int, length: int) -> float | None:
    """Return the base at which the critical pair rotates over the target length as over training's.

    Liu et al. 2023, arXiv:2310.05209, theorem 2: theta^(ln(length / 2 pi) / ln(trained / 2 pi)).

    Args:
        theta: The model's base.
        trained_length: Trained length in tokens.
        length: Target length in tokens.

    Returns:
        The base; None if no pair completes a rotation within the trained length.
    """
    trained = trained_length / (2 * math.pi)
    if trained <= 1:
        return None
    return theta ** (math.log(max(length, trained_length) / (2 * math.pi)) / math.log(trained))
