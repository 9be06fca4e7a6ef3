"""Means of any numbers over texts, with Student's t: losses, and differences of losses."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from rope_patch.statistics.intervals import Interval, cluster_sums, half_alpha
from rope_patch.statistics.paired_tests import stratum_weights
from rope_patch.statistics.power import required_texts


@dataclass(frozen=True)
class MeanTest:
    """A mean over texts, and the test whether it is zero.

    Attributes:
        mean: The mean with its interval; `effective_n` is the number of texts.
        p_value: Two-sided, of a mean of zero; 1 with a single text.
        deviation: The standard deviation of the texts' means; `inf` with a single text.
    """

    mean: Interval
    p_value: float
    deviation: float


def clustered_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    strata: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> MeanTest:
    """Return a mean whose interval and test take values of one text for one piece of evidence.

    Student's t on the texts' summed residuals (the linearised variance of a ratio, Cochran 1977,
    section 6.5; Miller 2024, arXiv:2411.00640), with one degree of freedom less than texts. A
    difference of two methods is tested by the mean of their differences on the same samples.

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
    groups: Sequence[Hashable] = [None] * len(values) if strata is None else strata
    if not values or not len(values) == len(clusters) == len(groups):
        raise ValueError(
            f"expected values with a text each, got {len(values)} values, {len(clusters)} texts "
            f"and {len(groups)} strata"
        )
    numbers = np.array(values, dtype=float)
    if not np.isfinite(numbers).all():
        raise ValueError("expected finite values; leave out samples without a likelihood")
    weights = stratum_weights(groups)
    mean = float((weights * numbers).sum() / len(numbers))
    residuals, _ = cluster_sums(weights * (numbers - mean), clusters)
    texts = len(residuals)
    if texts < 2:
        return MeanTest(Interval(mean, -math.inf, math.inf, len(values), texts), 1.0, math.inf)
    error = math.sqrt(texts / (texts - 1) * float((residuals**2).sum())) / len(numbers)
    half = float(special.stdtrit(texts - 1, 1 - half_alpha(confidence))) * error
    interval = Interval(mean, mean - half, mean + half, len(values), texts)
    if error == 0:
        return MeanTest(interval, 0.0 if mean else 1.0, 0.0)
    p_value = 2 * float(special.stdtr(texts - 1, -abs(mean) / error))
    return MeanTest(interval, p_value, error * math.sqrt(texts))


def welch_p(first: MeanTest, second: MeanTest) -> float:
    """Return the two-sided p-value of two means of other texts being the same.

    Welch's t test (Welch 1947), with a text's mean as one observation.

    Args:
        first: A mean over texts.
        second: A mean over other texts, which may vary otherwise.

    Returns:
        The p-value; 1 if either mean rests on a single text.
    """
    tests = (first, second)
    if not all(math.isfinite(test.deviation) for test in tests):
        return 1.0
    gap = abs(first.mean.estimate - second.mean.estimate)
    errors = [test.deviation**2 / test.mean.effective_n for test in tests]
    if sum(errors) == 0:
        return 0.0 if gap else 1.0
    freedom = sum(errors) ** 2 / sum(
        error**2 / (test.mean.effective_n - 1) for error, test in zip(errors, tests, strict=True)
    )
    return 2 * float(special.stdtr(freedom, -gap / math.sqrt(sum(errors))))


def texts_to_decide(test: MeanTest, level: float = 0.05) -> int | None:
    """Return about how many texts would show that a mean is not zero, were it as measured.

    Args:
        test: The mean as measured, on at least two texts.
        level: The two-sided level of the test to come.

    Returns:
        The number of texts in all with which 80% of runs would show it; None if the measurement
        gives no idea.
    """
    mean = abs(test.mean.estimate)
    if not mean or not math.isfinite(test.deviation):
        return None
    return required_texts(mean, test.deviation, level) if test.deviation else 2
