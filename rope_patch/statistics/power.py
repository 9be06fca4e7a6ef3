"""Power: the smallest mean that a t test over texts can show, and how many texts a mean takes."""

from __future__ import annotations

import math

from scipy import special

from rope_patch.statistics.intervals import half_alpha

POWER = 0.8  # the share of runs in which an effect of the stated size is shown; Cohen (1988)
_MAX_TEXTS = 10_000


def smallest_effect(
    texts: int, deviation: float, level: float = 0.05, power: float = POWER
) -> float:
    """Return the smallest mean that Student's t test over texts shows to differ from zero.

    The test statistic follows the noncentral t distribution, whose noncentrality is the mean over
    its standard error. The chance to be significant on the wrong side is left out: it is below
    level / 2.

    Args:
        texts: The number of texts.
        deviation: The standard deviation of the texts' means, in the unit of the answer.
        level: The two-sided level of the test, such as Holm's first: 0.05 over the comparisons.
        power: The probability to be significant, above one half.

    Returns:
        The mean's size; `inf` with fewer than two texts.

    Raises:
        ValueError: If the level or the power is out of range, or the deviation is not positive.
    """
    if not 0.5 < power < 1 or not deviation > 0:
        raise ValueError(
            f"expected power between 0.5 and 1 and a deviation above 0, got {power} and {deviation}"
        )
    upper = 1 - half_alpha(1 - level)
    if texts < 2:
        return math.inf
    critical = special.stdtrit(texts - 1, upper)
    noncentrality = float(special.nctdtrinc(texts - 1, 1 - power, critical))
    return noncentrality * deviation / math.sqrt(texts)


def required_texts(
    effect: float, deviation: float, level: float = 0.05, power: float = POWER
) -> int | None:
    """Return how many texts show a mean of this size with Student's t test.

    Args:
        effect: The mean's size, above 0.
        deviation: The standard deviation of the texts' means, in the same unit.
        level: The two-sided level of the test.
        power: The probability to be significant, above one half.

    Returns:
        The number of texts, at least two; None if 10,000 are too few.

    Raises:
        ValueError: See `smallest_effect`; or the effect is not positive.
    """
    if not effect > 0:
        raise ValueError(f"expected an effect above 0, got {effect}; give its size")
    too_few, enough = 1, 2
    while smallest_effect(enough, deviation, level, power) > effect:
        too_few, enough = enough, 2 * enough
        if too_few >= _MAX_TEXTS:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if smallest_effect(middle, deviation, level, power) > effect:
            too_few = middle
        else:
            enough = middle
    return enough if enough <= _MAX_TEXTS else None
