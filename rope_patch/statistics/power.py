"""Tell what a test can show with how many texts, and what looking at growing data costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy import special

from rope_patch.statistics.clustered_mean import ClusteredMean, hall_p_values
from rope_patch.statistics.intervals import half_alpha
from rope_patch.statistics.paired_tests import least_texts, sign_patterns

POWER = 0.8  # the share of runs in which an effect of the stated size is shown; Cohen (1988)
_MAX_TEXTS = 10_000
_DRAWS = 2000  # simulated runs: their share is known to one percent
_SIMULATED_TEXTS = 50  # beyond, skewness is known so well that the test is Student's t
_FLIPPED_TEXTS = 12  # beyond, sign flips of normal differences have the p-value of Student's t


def smallest_effect(
    texts: int, deviation: float, level: float = 0.05, power: float = POWER
) -> float:
    """Return the smallest mean that `mean_test` shows to differ from zero.

    Of normal differences: by simulation with few texts, by the noncentral t distribution with many.

    Args:
        texts: The number of texts.
        deviation: The standard deviation of the texts' means, in the unit of the answer.
        level: The two-sided level of the test, such as Holm's first: 0.05 over the comparisons.
        power: The probability to be significant, above one half.

    Returns:
        The mean's size; `inf` with fewer texts than show anything at this level.

    Raises:
        ValueError: If the level or the power is out of range, or the deviation is not positive.
    """
    _check(level, deviation, power)
    if texts < least_texts(level):
        return math.inf
    too_small, enough = 0.0, 1.0
    while _power(enough, texts, level) < power:
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1e-3 * enough:
        middle = (too_small + enough) / 2
        too_small, enough = (
            (too_small, middle) if _power(middle, texts, level) >= power else (middle, enough)
        )
    return enough * deviation


def required_texts(
    effect: float, deviation: float, level: float = 0.05, power: float = POWER
) -> int | None:
    """Return how many texts show a mean of this size by `mean_test`.

    Args:
        effect: The mean's size, above 0.
        deviation: The standard deviation of the texts' means, in the same unit.
        level: The two-sided level of the test.
        power: The probability to be significant, above one half.

    Returns:
        The number of texts, as many at least as show anything; None if 10,000 are too few.

    Raises:
        ValueError: See `smallest_effect`; or the effect is not positive.
    """
    if not effect > 0:
        raise ValueError(f"expected an effect above 0, got {effect}; give its size")
    _check(level, deviation, power)
    ratio = effect / deviation

    def is_enough(texts: int) -> bool:
        return _power(ratio, texts, level) >= power

    return least_number(is_enough, least_texts(level), _MAX_TEXTS)


def least_number(
    is_enough: Callable[[int], bool], start: int, most: int = _MAX_TEXTS
) -> int | None:
    """Return the least number from `start` to `most` that is enough; None if none is.

    Args:
        is_enough: Whether a number is; where one is, larger ones are, too.
        start: The first number to try.
        most: The last one.
    """
    too_few, enough = start - 1, start
    while not is_enough(enough):
        if enough >= most:
            return None
        too_few, enough = enough, min(2 * enough, most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return enough


def texts_to_decide(measured: ClusteredMean, level: float = 0.05) -> int | None:
    """Return about how many texts would show that a mean is not zero, were it as measured.

    Args:
        measured: The mean as measured, on at least two texts.
        level: The two-sided level of the test to come.

    Returns:
        The number of texts in all with which 80% of runs would show it; None if the measurement
        gives no idea.
    """
    mean, deviation = abs(measured.mean.estimate), measured.deviation
    if not mean or not math.isfinite(deviation):
        return None
    return required_texts(mean, deviation, level) if deviation else least_texts(level)


def _check(level: float, deviation: float, power: float) -> None:
    half_alpha(1 - level)  # refuses what is no level
    if not 0.5 < power < 1 or not deviation > 0:
        raise ValueError(
            f"expected power between 0.5 and 1 and a deviation above 0, got {power} and {deviation}"
        )


def _power(ratio: float, texts: int, level: float) -> float:
    """Return how often a mean of `ratio` standard deviations is shown, on the right side."""
    if texts > _SIMULATED_TEXTS:
        critical = special.stdtrit(texts - 1, 1 - half_alpha(1 - level))
        return 1 - float(special.nctdtr(texts - 1, ratio * math.sqrt(texts), critical))
    values = _standard_normal(texts) + ratio
    means = values.mean(axis=1)
    shown = (means > 0) & (hall_p_values(values) < level)
    if texts <= _FLIPPED_TEXTS:
        flipped = values @ sign_patterns(texts).T.astype(float)
        totals = values.sum(axis=1, keepdims=True)
        shown &= ((flipped <= 0) | (flipped >= totals)).mean(axis=1) < level
    return float(shown.mean())


@lru_cache(maxsize=_SIMULATED_TEXTS)
def _standard_normal(texts: int) -> np.ndarray:
    """Return the texts' deviations in simulated runs, `[runs, texts]`, always the same."""
    return np.random.default_rng(texts).normal(size=(_DRAWS, texts))


def look_factor(looks: int) -> int:
    """Return what multiplies a p-value at a look, so that all looks share one error rate.

    A test that is repeated as data grows, until it is significant, calls a difference that is none
    more often than its level. Here look j tests at level / (j (j + 1)), and these levels sum to the
    level over any number of looks (Bonferroni; alpha spending, Lan & DeMets 1983). So the chance of
    a false call at any look stays below the level, however the looks depend on each other and
    however many are left. Most is spent on the first look, where few texts make a strict level
    dearest.

    Args:
        looks: Looks so far, this one counted; 0 for data of a size that was fixed beforehand.

    Returns:
        The factor: 1 without looks, else 2, 6, 12, 20, ...

    Raises:
        ValueError: If the number is negative.
    """
    if looks < 0:
        raise ValueError(f"expected at least 0 looks, got {looks}")
    return looks * (looks + 1) if looks else 1
