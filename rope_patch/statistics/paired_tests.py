"""Test whether two methods differ on the same samples by more than chance.

Single hits and misses take McNemar's exact test. All other scores take sign flips of texts, an
exact test of symmetric differences; `sign_flip_test` has the interval that agrees with it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from rope_patch.statistics.bootstrap import RESAMPLES, percentile_bounds, resample_means
from rope_patch.statistics.intervals import Interval, as_scores, cluster_sums, stratum_weights


@dataclass(frozen=True)
class PairedTest:
    """Method a against method b on the same samples.

    Attributes:
        difference: Mean score of a less that of b, over the pairs in which neither failed.
        p_value: Two-sided, of no difference.
        wins: Pairs in which a scored higher; for hits and misses, those that only a hit.
        losses: Pairs in which b scored higher.
        ties: The other pairs.
        test: "McNemar exact" or "sign flips of clusters".
    """

    difference: Interval
    p_value: float
    wins: int
    losses: int
    ties: int
    test: str


def mcnemar(
    a: Sequence[float | None],
    b: Sequence[float | None],
    clusters: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedTest:
    """Test pairs of hits and misses exactly (McNemar 1947).

    Of the pairs that only one method hit, either method gets each with probability 1/2 if there is
    no difference. That asks for 0/1 scores and independent pairs; for fractional scores, and where
    pairs share a text, the test is `paired_difference`'s, which equals this one where both hold.

    Args:
        a: Scores of method a; None for samples that failed.
        b: Scores of method b on the same samples.
        clusters: The text of each pair; None if all are independent.
        strata: The stratum of each pair, such as its task. Each stratum counts the same, however
            many pairs it has. None if each pair counts the same.
        confidence: Two-sided level of the difference's interval.
        resamples: The number of resamples and sign flips to draw.
        seed: The seed of the draws.

    Raises:
        ValueError: See `paired_difference`.
    """
    return _paired_test(a, b, clusters, strata, confidence, resamples, seed, exact=True)


def paired_difference(
    a: Sequence[float | None],
    b: Sequence[float | None],
    clusters: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedTest:
    """Test the difference of mean scores on the same samples, by clusters (Miller 2024).

    The p-value is of a randomisation test (Fisher 1935): without a difference a text's scores
    might as well have been the other method's, so every cluster's summed difference may have
    either sign. All signs are tried where `resamples` allows, else as many are drawn. With k
    clusters that differ it cannot fall below 2^(1-k): at five, nothing is significant at 5%.

    The interval is a cluster bootstrap's. Bonett & Price (2012) add a pair won by either method;
    here the draws include two more clusters, one all won and one all lost. Their size is the design
    effect of pairs of one text, or a whole text if no pair differs. So the interval keeps a width
    even if methods agree on all of ten samples. For few clusters it is conservative. Where p is not
    below 1 - confidence it is widened to reach zero.

    Args:
        a: Scores of method a in 0..1; None for samples that failed.
        b: Scores of method b on the same samples.
        clusters: The text of each pair; None if all are independent.
        strata: The stratum of each pair, such as its task. Each stratum counts the same, however
            many pairs it has. None if each pair counts the same.
        confidence: Two-sided level of the difference's interval.
        resamples: The number of resamples and sign flips to draw.
        seed: The seed of the draws.

    Raises:
        ValueError: If no pair was scored, a score is outside 0..1 or the lengths differ.
    """
    return _paired_test(a, b, clusters, strata, confidence, resamples, seed, exact=False)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of comparisons (Holm 1979), in the order given.

    Several methods compared with one give some small p-value by chance. Calling significant what
    is below the level after the adjustment keeps the chance of any false call below that level,
    however the tests depend on each other.

    Args:
        p_values: One for each comparison.

    Raises:
        ValueError: If one is not in 0..1.
    """
    p = np.array(p_values, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"expected p-values in 0..1, got {list(p_values)}; leave undefined out")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(adjusted, 1).tolist()


def _paired_test(
    a: Sequence[float | None],
    b: Sequence[float | None],
    clusters: Sequence[Hashable] | None,
    strata: Sequence[Hashable] | None,
    confidence: float,
    resamples: int,
    seed: int,
    exact: bool,
) -> PairedTest:
    texts: Sequence[Hashable] = range(len(a)) if clusters is None else clusters
    groups: Sequence[Hashable] = [None] * len(a) if strata is None else strata
    if not len(a) == len(b) == len(texts) == len(groups):
        raise ValueError(
            f"expected pairs, got {len(a)} and {len(b)} scores and {len(texts)} clusters; "
            "give both methods' scores of the same samples, None where one failed"
        )
    scored = [i for i in range(len(a)) if a[i] is not None and b[i] is not None]
    if not scored:
        raise ValueError(
            f"expected at least one pair of scores, got {len(a)} in which one failed; "
            "leave this comparison out or run it again"
        )
    ours, theirs = as_scores([a[i] for i in scored]), as_scores([b[i] for i in scored])
    differences = ours - theirs
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    weights = stratum_weights([groups[i] for i in scored])
    differences = differences * weights
    sums, sizes = cluster_sums(differences, [texts[i] for i in scored], weights)
    whole = np.isin(np.concatenate([ours, theirs]), (0, 1)).all()
    if exact and whole and len(sizes) == len(scored) and np.ptp(weights) == 0:
        test = "McNemar exact"
        p_value = min(1.0, 2 * float(special.bdtr(min(wins, losses), wins + losses, 0.5)))
    else:
        test = "sign flips of clusters"
        p_value = sign_flip_p(sums[sums != 0], resamples, seed)
    low, high = _difference_bounds(
        sums, sizes, float((differences**2).sum()), confidence, resamples, seed
    )
    n, mean = len(scored), float(differences.mean())
    if p_value >= 1 - confidence:  # what the test does not show, the interval does not show either
        low, high = min(low, 0.0), max(high, 0.0)
    bounds = min(low, mean), max(high, mean)
    interval = Interval(mean, *bounds, n, len(sums), failed=len(a) - n)
    return PairedTest(interval, p_value, wins, losses, n - wins - losses, test)


def _difference_bounds(
    sums: np.ndarray,
    sizes: np.ndarray,
    squares: float,
    confidence: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """Return bounds of the mean difference with two clusters added, see `paired_difference`."""
    size = sizes.mean()
    if squares > 0:
        size = min(max(float((sums**2).sum()) / squares, 1.0), size)
    sums = np.concatenate([sums, [size, -size]])
    sizes = np.concatenate([sizes, [size, size]])
    means = resample_means(sums, sizes, len(sums), resamples, seed)
    return percentile_bounds(means, len(sums), confidence)


MAX_PATTERNS = 2**15  # sign patterns that are tried: all of up to 16 texts
# Share of the texts' summed sizes within which totals count as equal despite rounding.
_ROUNDING = 1e-9
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
