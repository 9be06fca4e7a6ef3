"""Means of numbers over texts, and tests whether one mean is zero or two means are equal.

A mean by itself, such as a method's loss, has Student's t interval. Whether a difference is shown
is decided by `mean_test` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from rope_patch.statistics.intervals import Interval, cluster_sums, half_alpha, stratum_weights
from rope_patch.statistics.paired_tests import MAX_PATTERNS, sign_flip_test

_STRAIGHT = 1e-8  # least skewness at which Hall's t differs from Student's in double precision
# Against the skew, Hall's cubic is flat at t = 3 / skewness, where no effect would be large enough.
# From half way on it goes on in a straight line, with the slope that it has there, 1/4.
_KNEE, _SLOPE = 1.5, 0.25


@dataclass(frozen=True)
class ClusteredMean:
    """A mean over texts.

    Attributes:
        mean: The mean with its interval; `effective_n` is the number of texts.
        by_text: A value for each text, whose plain mean is the mean: the text's own mean where all
            texts have as many values, else moved with its part in the whole.
    """

    mean: Interval
    by_text: tuple[float, ...]

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the texts' values; `inf` with a single text."""
        return float(np.std(self.by_text, ddof=1)) if len(self.by_text) > 1 else math.inf


@dataclass(frozen=True)
class MeanTest(ClusteredMean):
    """A mean over texts, with the test whether it is zero; see `mean_test`.

    Attributes:
        p_value: Two-sided, of the hypothesis that the mean is zero; below 1 - confidence where zero
            is outside the interval, and only there.
    """

    p_value: float


def clustered_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    strata: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> ClusteredMean:
    """Return a mean whose interval takes values of one text for one piece of evidence.

    Student's t on the texts' summed residuals (the linearised variance of a ratio, Cochran 1977,
    section 6.5; Miller 2024, arXiv:2411.00640), with one degree of freedom less than texts.

    Args:
        values: The values, such as nats per token; finite.
        clusters: The text of each value.
        strata: The stratum of each value, such as its task; each stratum counts the same. None if
            each value counts the same.
        confidence: Two-sided level of the interval.

    Returns:
        The mean; without bounds, `-inf` and `inf`, for a single text.

    Raises:
        ValueError: There are no values, one is not finite, or the lengths differ.
    """
    sums, weights = _text_sums(values, clusters, strata)
    mean, by_text = _mean_by_text(sums, weights)
    texts, half = len(by_text), math.inf
    if texts > 1:
        error = float(by_text.std(ddof=1)) / math.sqrt(texts)
        half = float(special.stdtrit(texts - 1, 1 - half_alpha(confidence))) * error
    interval = Interval(mean, mean - half, mean + half, len(values), texts)
    return ClusteredMean(interval, tuple(by_text.tolist()))


def mean_test(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    strata: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> MeanTest:
    """Test whether a mean difference is zero: the rule by which a difference is shown.

    Two tests must both reject. Sign flips of texts are exact where the two methods may be exchanged
    without a change, however few texts there are and however strata weigh; they show nothing below
    six texts. Skewed differences of mean zero are no such case: a rare large gain makes most
    samples look like a loss. There Student's t, corrected for the skewness that the texts show
    (Hall 1992, Journal of the Royal Statistical Society B 54), errs least; docs/evaluation.md has
    the simulation. The p-value is the larger of the two, and the interval holds all means that
    either test leaves, so it excludes zero where p is below 1 - confidence, and only there.

    Args:
        values: Differences of two methods on the same samples, such as nats per token; finite.
        clusters: The text of each value.
        strata: See `clustered_mean`.
        confidence: Two-sided level of the interval.

    Returns:
        The test; without bounds, `-inf` and `inf`, for too few texts.

    Raises:
        ValueError: See `clustered_mean`.
    """
    sums, weights = _text_sums(values, clusters, strata)
    mean, by_text = _mean_by_text(sums, weights)
    p_flips, *flip_bounds = sign_flip_test(sums, weights, confidence)
    p_hall = float(hall_p_values(by_text[None])[0]) if len(by_text) > 1 else 1.0
    hall_bounds = _hall_bounds(mean, by_text, confidence)
    low, high = min(flip_bounds[0], hall_bounds[0]), max(flip_bounds[1], hall_bounds[1])
    interval = Interval(mean, min(low, mean), max(high, mean), len(values), len(by_text))
    return MeanTest(interval, tuple(by_text.tolist()), max(p_flips, p_hall))


def hall_p_values(samples: np.ndarray) -> np.ndarray:
    """Return two-sided p-values of means of zero by Hall's transformed t, `[samples]`.

    With t and the standardised third cumulant c of the mean, the statistic is
    t + c t² / 3 + c² t³ / 27 + c / 6. It grows with t, so its interval is one piece.

    Args:
        samples: Values of texts, `[samples, texts]`, at least two texts.
    """
    means = samples.mean(axis=1)
    errors, skewness = _errors_and_skewness(samples)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(means == 0, 0.0, np.abs(means) / errors)
    skewness = np.where(means < 0, -skewness, skewness)
    straight = np.abs(skewness) < _STRAIGHT
    curve = np.where(straight, 1.0, skewness)
    bent = np.where(curve < 0, np.minimum(t, _KNEE / np.abs(curve)), t)
    with np.errstate(over="ignore", invalid="ignore"):
        cubic = ((1 + curve * bent / 3) ** 3 - 1) / curve + curve / 6
        statistic = np.where(t > bent, cubic + (t - bent) * _SLOPE, cubic)
    p = 2 * special.stdtr(samples.shape[1] - 1, -np.where(straight, t, statistic))
    return np.where(means == 0, 1.0, np.minimum(p, 1.0))


def two_means_p(first: ClusteredMean, second: ClusteredMean) -> float:
    """Return the two-sided p-value of a test whether two means over different texts are equal.

    The larger one of Welch's t test (Welch 1947), with a text's value as one observation, and of a
    permutation test (Fisher 1935): which texts are the first's and which the second's.

    Args:
        first: A mean over texts.
        second: A mean over other texts, whose variance may differ.

    Returns:
        The p-value; 1 if either mean rests on a single text.
    """
    if min(len(first.by_text), len(second.by_text)) < 2:
        return 1.0
    gap = abs(first.mean.estimate - second.mean.estimate)
    errors = [test.deviation**2 / len(test.by_text) for test in (first, second)]
    permuted = _permutation_p(np.array(first.by_text), np.array(second.by_text))
    if sum(errors) == 0:
        return permuted
    freedom = sum(errors) ** 2 / sum(
        error**2 / (len(test.by_text) - 1)
        for error, test in zip(errors, (first, second), strict=True)
    )
    return max(permuted, 2 * float(special.stdtr(freedom, -gap / math.sqrt(sum(errors)))))


def _text_sums(
    values: Sequence[float], clusters: Sequence[Hashable], strata: Sequence[Hashable] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the texts' weighted sums and summed weights, both `[texts]`."""
    groups: Sequence[Hashable] = [None] * len(values) if strata is None else strata
    if not 0 < len(values) == len(clusters) == len(groups):
        raise ValueError(
            f"expected values with a text each, got {len(values)} values, {len(clusters)} texts "
            f"and {len(groups)} strata"
        )
    numbers = np.array(values, dtype=float)
    if not np.isfinite(numbers).all():
        raise ValueError("expected finite values; leave out samples without a likelihood")
    weights = stratum_weights(groups)
    return cluster_sums(weights * numbers, clusters, weights)


def _mean_by_text(sums: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean, and each text's linearised value, `[texts]`."""
    mean = float(sums.sum() / weights.sum())
    return mean, mean + (sums - mean * weights) * len(sums) / weights.sum()


def _errors_and_skewness(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard errors of means and the standardised third cumulants, `[samples]`."""
    texts = samples.shape[1]
    residuals = samples - samples.mean(axis=1, keepdims=True)
    squares = (residuals**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        skewness = np.where(squares > 0, (residuals**3).sum(axis=1) / squares**1.5, 0.0)
    return np.sqrt(squares / (texts - 1) / texts), skewness


def _hall_bounds(mean: float, by_text: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the means that Hall's t does not reject: its statistic, solved for the mean."""
    texts = len(by_text)
    if texts < 2:
        return -math.inf, math.inf
    (error,), (skewness,) = _errors_and_skewness(by_text[None])
    limit = float(special.stdtrit(texts - 1, 1 - half_alpha(confidence)))
    below, above = _hall_t(limit, float(skewness)), _hall_t(limit, -float(skewness))
    return mean - float(error) * below, mean + float(error) * above


def _hall_t(statistic: float, skewness: float) -> float:
    """Return the t at which Hall's statistic, see `hall_p_values`, has a value above 0."""
    if abs(skewness) < _STRAIGHT:
        return statistic
    if skewness < 0:
        knee = _KNEE / -skewness
        at_knee = ((1 - _KNEE / 3) ** 3 - 1) / skewness + skewness / 6
        if statistic > at_knee:
            return knee + (statistic - at_knee) / _SLOPE
    cube = 1 + skewness * (statistic - skewness / 6)
    return float(3 / skewness * (np.cbrt(cube) - 1))


def _permutation_p(first: np.ndarray, second: np.ndarray) -> float:
    """Return the share of divisions of the texts whose means lie at least as far apart."""
    pooled, count = np.concatenate([first, second]), len(first)
    if math.comb(len(pooled), count) <= MAX_PATTERNS:
        chosen = np.array(list(itertools.combinations(range(len(pooled)), count)))
    else:
        generator = np.random.default_rng(0)
        order = np.tile(np.arange(len(pooled)), (MAX_PATTERNS // 8, 1))
        chosen = generator.permuted(order, axis=1)[:, :count]
        chosen[0] = np.arange(count)  # the observed division is among them, hence p is never 0
    sums = pooled[chosen].sum(axis=1)
    gaps = np.abs(sums / count - (pooled.sum() - sums) / (len(pooled) - count))
    observed = abs(first.mean() - second.mean())
    return float((gaps >= observed - 1e-9 * np.abs(pooled).max()).mean())
