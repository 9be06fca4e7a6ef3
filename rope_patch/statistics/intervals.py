"""Confidence intervals of shares: of independent samples, and of samples that share texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special


@dataclass(frozen=True)
class Interval:
    """An estimate and the confidence interval around it.

    Attributes:
        estimate: The point estimate; NaN if there is none.
        low: Lower bound.
        high: Upper bound; `inf` if the data sets none.
        n: The number of units that were measured.
        effective_n: The number of independent units with the same information.
        failed: Units that failed and hold no information; not part of `n`.
        unit: What `n` counts: "samples", "documents" or "blocks".
    """

    estimate: float
    low: float
    high: float
    n: float
    effective_n: float
    failed: int = 0
    unit: str = "samples"

    @property
    def half_width(self) -> float:
        """Return half the distance of the bounds, which need not lie evenly around the estimate."""
        return (self.high - self.low) / 2


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Return the score interval of a share (Wilson 1927).

    Unlike the mean's standard error it does not vanish where every sample hits: 10 of 10 gives
    [0.72, 1]. For scores between 0 and 1 it is conservative, as no variable on [0, 1] varies more
    than a 0/1 variable of the same mean.

    Args:
        successes: Hits, or the sum of scores in 0..1; at most `n`.
        n: Samples, or an effective number of them, not necessarily whole.
        confidence: Two-sided level, between 0 and 1.

    Raises:
        ValueError: If there are no samples or more successes than samples.
    """
    if not n > 0 or not -1e-9 <= successes <= n * (1 + 1e-9):
        raise ValueError(
            f"expected n > 0 and 0 <= successes <= n, got {successes} of {n}; "
            "give the sum of scores in 0..1 and their number"
        )
    share = min(max(successes / n, 0.0), 1.0)
    z2 = float(special.ndtri(1 - half_alpha(confidence))) ** 2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low = 0.0 if share == 0 else centre - half  # exact where rounding would miss it
    high = 1.0 if share == 1 else centre + half
    return Interval(share, low, high, n, n)


def clopper_pearson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Return the exact interval of a share (Clopper & Pearson 1934).

    Each bound errs with at most half of `1 - confidence`, however few samples there are, where
    Wilson's may err somewhat more. 10 of 10 gives [0.69, 1].

    Args:
        successes: Hits, or the sum of scores in 0..1; at most `n`.
        n: Samples, or an effective number of them, not necessarily whole.
        confidence: Two-sided level, between 0 and 1.

    Raises:
        ValueError: See `wilson`.
    """
    share, alpha = wilson(successes, n, confidence).estimate, half_alpha(confidence)
    hits, misses = share * n, n - share * n
    low = 0.0 if share == 0 else float(special.betaincinv(hits, misses + 1, alpha))
    high = 1.0 if share == 1 else float(special.betaincinv(hits + 1, misses, 1 - alpha))
    return Interval(share, low, high, n, n)


def grown(interval: Interval, times: float) -> Interval:
    """Return the exact interval of the same share on so many times the samples.

    Args:
        interval: Of a share.
        times: At least 1.
    """
    n = interval.effective_n * times
    return clopper_pearson(interval.estimate * n, n)


def accuracy(
    scores: Sequence[float | None],
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    bounds: Callable[[float, float, float], Interval] = wilson,
) -> Interval:
    """Return the mean score with an interval that accounts for samples sharing a text.

    Samples on one text hit and miss together, so they hold less information than independent ones
    (Miller 2024, arXiv:2411.00640). The design effect, the variance by clusters (linearised, from
    the clusters' summed residuals) over that of independent samples, divides n; the interval is
    that of a share on what remains (Dean & Pagano 2015). Few clusters make the design effect itself
    uncertain, for which the effective n shrinks by Student's quantiles (Korn & Graubard 1998). It
    stays between that of independent samples and that of texts whose samples all agree (for equal
    clusters: their number). Equal scores do not show how far samples agree: they take the latter.
    No bound is better than a perfect result's on the same texts: otherwise one miss, which looks
    like independence, would raise the lower bound.

    A failed sample is not a miss: it holds no information about the answer, so it counts in
    `failed` and not in the estimate. If failures may depend on the difficulty, read both.

    Args:
        scores: Scores in 0..1; None for samples that failed.
        clusters: The text of each score; None if all samples are independent.
        confidence: Two-sided level, between 0 and 1.
        bounds: The interval of a share, `wilson` or `clopper_pearson`.

    Raises:
        ValueError: If no sample was scored, a score is outside 0..1 or the lengths differ.
    """
    if clusters is not None and len(clusters) != len(scores):
        raise ValueError(
            f"expected a cluster for each of {len(scores)} scores, got {len(clusters)}; "
            "give the text of every sample, failed ones too"
        )
    scored = [i for i, score in enumerate(scores) if score is not None]
    if not scored:
        raise ValueError(
            f"expected at least one score, got {len(scores)} samples, all failed; "
            "leave this measurement out or run it again"
        )
    values = as_scores([scores[i] for i in scored])
    n = len(values)
    effective, least = float(n), float(n)
    if clusters is not None:
        sums, sizes = cluster_sums(values, [clusters[i] for i in scored])
        least = n * n / float((sizes**2).sum())
        effective = least
        if np.ptp(values) > 0 and len(sizes) > 1:
            effective = min(max(_effective_n(sums, sizes, confidence), least), float(n))
    mean = float(values.mean())
    interval = bounds(mean * effective, effective, confidence)
    perfect = bounds(least, least, confidence).low
    low, high = min(interval.low, perfect), max(interval.high, 1 - perfect)
    return Interval(mean, low, high, n, effective, failed=len(scores) - n)


def required_samples(precision: float, confidence: float = 0.95, expected: float = 0.5) -> int:
    """Return how many independent samples bring Wilson's half-width down to `precision`.

    The half-width, set equal to the precision, is a quadratic equation in n.

    Args:
        precision: Half-width wanted, as a share (0.05 is five points).
        confidence: Two-sided level, between 0 and 1.
        expected: The share expected; 0.5 is the worst case and so always enough.

    Raises:
        ValueError: If the precision or the expected share is out of range.
    """
    if not precision > 0 or not 0 <= expected <= 1:
        raise ValueError(
            f"expected precision > 0 and expected in 0..1, got {precision} and {expected}; "
            "give both as shares, 0.05 for five points"
        )
    if precision >= 0.5:
        return 1
    z2 = float(special.ndtri(1 - half_alpha(confidence))) ** 2
    square = precision**2
    half_b = z2 * (square - expected * (1 - expected) / 2)
    c = z2 * z2 * (square - 0.25)  # negative, so that just one root is positive
    root = (-half_b + math.sqrt(half_b**2 - square * c)) / square
    return max(1, math.ceil(root - 1e-9))


def is_precise(interval: Interval, precision: float) -> bool:
    """Return whether the interval's half-width is within `precision`; a NaN never is."""
    return interval.half_width <= precision * (1 + 1e-9)


def half_alpha(confidence: float) -> float:
    """Return the probability left on either side of a two-sided interval."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected confidence between 0 and 1, got {confidence}; say 0.95")
    return (1 - confidence) / 2


def as_scores(scores: Sequence[float | None]) -> np.ndarray:
    """Return scores as float64 `[n]`.

    Raises:
        ValueError: If one is not in 0..1.
    """
    values = np.array(scores, dtype=float)
    if not ((values >= 0) & (values <= 1)).all():
        bad = values[~((values >= 0) & (values <= 1))][0]
        raise ValueError(f"expected scores in 0..1, got {bad}; scale them, None if a sample failed")
    return values


def cluster_sums(
    values: np.ndarray, clusters: Sequence[Hashable], weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return each cluster's sum of values and of weights, both float64 `[clusters]`.

    Args:
        values: The values, `[n]`.
        clusters: Each value's cluster.
        weights: Each value's weight, `[n]`; None if each weighs 1.
    """
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(cluster, len(numbers)) for cluster in clusters]
    return np.bincount(index, weights=values), np.bincount(index, weights=weights).astype(float)


def stratum_weights(strata: Sequence[Hashable]) -> np.ndarray:
    """Return a weight for each pair, 1 on average, so that all strata weigh the same, `[n]`."""
    counts = Counter(strata)
    each = len(strata) / len(counts)
    return np.array([each / counts[stratum] for stratum in strata])


def _effective_n(sums: np.ndarray, sizes: np.ndarray, confidence: float) -> float:
    """Return n over the design effect, less what few clusters cost; `inf` if clusters agree."""
    n, groups = sizes.sum(), len(sizes)
    mean = sums.sum() / n
    independent = n / (n - 1) * n * mean * (1 - mean)
    by_cluster = groups / (groups - 1) * float(((sums - mean * sizes) ** 2).sum())
    if by_cluster == 0:
        return math.inf
    upper = 1 - half_alpha(confidence)
    few = special.stdtrit(n - 1, upper) / special.stdtrit(groups - 1, upper)
    return float(n * independent / by_cluster * few**2)
