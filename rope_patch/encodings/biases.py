"""Compute biases on attention logits: ALiBi (arXiv:2108.12409), decays, T5's (arXiv:1910.10683)."""

from __future__ import annotations

import math

import torch

from rope_patch.encodings.tables import dot_products
from rope_patch.utils.errors import Refused

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
    """Return stretched slopes: the steepest stays, and the flattest is divided by a factor.

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


def t5_bucket(
    relative: torch.Tensor,
    *,
    bidirectional: bool = False,
    buckets: int = 32,
    max_distance: int = 128,
) -> torch.Tensor:
    """Return the bucket of each relative position.

    Half of a direction's buckets hold one distance each, the others grow evenly in the logarithm
    up to `max_distance`, and the last one holds all beyond. The logarithm is in float32, as in the
    models: in float64 some borders would move.

    Args:
        relative: Key position - query position, whole numbers of any shape.
        bidirectional: Whether keys may lie ahead, which takes half of the buckets; if not, all
            keys ahead are in bucket 0.
        buckets: Rows of the learned table.
        max_distance: Where the last bucket begins, at the latest.
    """
    offset = torch.zeros_like(relative)
    distance = -relative.clamp(max=0)
    if bidirectional:
        buckets //= 2
        offset, distance = (relative > 0) * buckets, relative.abs()
    exact = exact_distances(buckets)
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def exact_distances(buckets: int, *, bidirectional: bool = False) -> int:
    """Return how many distances of a direction have a bucket of their own: half of its buckets."""
    return buckets // (4 if bidirectional else 2)


def squeeze_tail(
    distances: torch.Tensor, *, trained: int, length: int | torch.Tensor, exact: int = 16
) -> torch.Tensor:
    """Return squeezed distances: near ones stay, and far ones move into the trained ones.

    Distances from `exact` to `length` are spread over `exact` to `trained` evenly in their
    logarithm, and rounded down.

    Args:
        distances: Whole numbers from 0, of any shape.
        trained: The longest distance in training.
        length: The longest distance to come, above `trained`; or a tensor of one number on the
            distances' device, which is not read: at `trained`, all distances stay.
        exact: Distances below it stay.

    Raises:
        ValueError: Nothing lies between `exact` and the lengths.
    """
    if exact >= trained or (isinstance(length, int) and length <= trained):
        raise Refused(
            f"expected exact < trained < length, got {exact:,}, {trained:,} and {length:,}"
        )
    reach: float | torch.Tensor = (
        math.log(length / exact) if isinstance(length, int) else (length.double() / exact).log()
    )
    power = math.log(trained / exact) / reach
    far = exact * (distances.clamp(min=exact).double() / exact) ** power
    return torch.where(distances < exact, distances, (far + 1e-9).floor().long())
