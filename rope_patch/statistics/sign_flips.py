"""Sign flips of texts: an exact test of symmetric differences, and the interval that agrees."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

MAX_PATTERNS = 2**15  # sign patterns that are tried: all of up to 16 texts
_ROUNDING = 1e-9  # of the texts' summed sizes: equal totals count as equal, rounding or not
_MAX_ENTRIES = 2**22  # signs of all sampled patterns: fewer patterns of more than 128 texts
_PATTERNS_AT_ONCE = 2**12


def least_texts(level: float) -> int:
    """Return the fewest texts with which sign flips can show anything at a two-sided level.

    With n texts that all differ in one direction, 2 of 2**n sign patterns reach the total.

    Args:
        level: The level, such as 0.05 for one comparison: six texts.
    """
    texts = 1
    while 2.0 ** (1 - texts) >= level:
        texts += 1
    return texts


def sign_flip_p(sums: np.ndarray, max_patterns: int = MAX_PATTERNS, seed: int = 0) -> float:
    """Return the two-sided p-value of a total of zero, by the texts' signs (Fisher 1935).

    If the two methods may be exchanged without a change, each text's sum may have either sign, so
    the share of sign patterns with at least this total is an exact p-value. More texts than have
    `max_patterns` patterns get a seeded sample of patterns, the observed one among them, which
    keeps the level exact (Hemerik & Goeman 2018, arXiv:1411.7565).

    Args:
        sums: Each text's summed difference, `[texts]`.
        max_patterns: Patterns to try; a pattern and its opposite count as one.
        seed: The seed of sampled patterns.
    """
    if not len(sums):
        return 1.0
    flipped, _ = _flipped_sums(sums, np.ones(len(sums)), max_patterns, seed)
    return _share_as_far(sums, flipped)


def sign_flip_test(
    sums: np.ndarray, weights: np.ndarray, confidence: float
) -> tuple[float, float, float]:
    """Return the p-value of a mean of zero, and the bounds of all means that are not rejected.

    A mean is rejected if flipping the signs of the texts' differences from it gives p below
    1 - confidence. That holds for the means below a certain subset's (the typical values of
    Hartigan 1969), so the bounds are exact: zero lies outside them where p is below that level.

    Args:
        sums: Each text's weighted sum, `[texts]`.
        weights: Each text's summed weight, above 0, `[texts]`; the mean is that of all texts.
        confidence: Two-sided level of the bounds.
    """
    flipped, flipped_weights = _flipped_sums(sums, weights, MAX_PATTERNS, 0)
    p_value = _share_as_far(sums, flipped)
    # All subsets of texts but none and all: those that a pattern flips, and the rest.
    parts = np.concatenate([flipped[1:], sums.sum() - flipped[1:]])
    parts[np.abs(parts) <= _tolerance(sums)] = 0.0
    means = parts / np.concatenate([flipped_weights[1:], weights.sum() - flipped_weights[1:]])
    # Where k - 1 subsets' means lie below it, a mean gets p = k / patterns.
    rank = math.ceil((1 - confidence) * len(flipped) - 1)
    if rank < 1:
        return p_value, -math.inf, math.inf
    ordered = np.partition(means, [rank - 1, len(means) - rank])
    return p_value, float(ordered[rank - 1]), float(ordered[len(means) - rank])


@lru_cache(maxsize=8)
def sign_patterns(texts: int, max_patterns: int = MAX_PATTERNS, seed: int = 0) -> np.ndarray:
    """Return which texts' signs are flipped, 0 or 1, `[patterns, texts]`; the first flips none.

    Args:
        texts: How many texts there are.
        max_patterns: See `sign_flip_p`.
        seed: See `sign_flip_p`.
    """
    if 2 ** (texts - 1) <= max_patterns:  # the last text keeps its sign: opposites count as one
        numbers = np.arange(2 ** (texts - 1), dtype=np.int64)[:, None]
        patterns = ((numbers >> np.arange(texts)) & 1).astype(np.int8)
    else:
        count = min(max_patterns, _MAX_ENTRIES // texts)
        drawn = np.random.default_rng(seed).integers(2, size=(2 * count, texts), dtype=np.int8)
        # The observed signs come first, and neither they nor their opposites come again.
        others = drawn[drawn.any(axis=1) & ~drawn.all(axis=1)][: count - 1]
        patterns = np.concatenate([np.zeros((1, texts), dtype=np.int8), others])
    patterns.flags.writeable = False
    return patterns


def _flipped_sums(
    sums: np.ndarray, weights: np.ndarray, max_patterns: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what each pattern flips: its texts' summed sums and weights, both `[patterns]`."""
    patterns = sign_patterns(len(sums), max_patterns, seed)
    columns = np.stack([sums, weights], axis=1)
    parts = [
        patterns[start : start + _PATTERNS_AT_ONCE].astype(float) @ columns
        for start in range(0, len(patterns), _PATTERNS_AT_ONCE)
    ]
    flipped = np.concatenate(parts)
    return flipped[:, 0], flipped[:, 1]


def _share_as_far(sums: np.ndarray, flipped: np.ndarray) -> float:
    """Return the share of patterns whose total is at least as far from zero as the observed one."""
    total = sums.sum()
    return float((np.abs(total - 2 * flipped) >= abs(total) - 2 * _tolerance(sums)).mean())


def _tolerance(sums: np.ndarray) -> float:
    return _ROUNDING * float(np.abs(sums).sum())
