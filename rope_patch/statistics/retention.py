"""Means over tasks, retention of a base score at a length, and the effective length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rope_patch.statistics.intervals import Interval


def stratified_mean(strata: Sequence[Interval]) -> Interval:
    """Return the mean of independent estimates that count alike, such as accuracies of tasks.

    How many samples each rests on does not matter to the mean, so that a task which was measured
    on more of them counts no more. The bounds are MOVER's (Zou & Donner 2008): the distance of the
    mean to a bound is the root of the summed squares of the estimates' own distances to theirs,
    over their number. So Wilson's asymmetry is kept, and a task without a miss still has a width.

    Args:
        strata: The estimates, at least one.

    Returns:
        The mean. `n` and `failed` are sums, `effective_n` is that of as many samples of one kind.

    Raises:
        ValueError: If there are none.
    """
    if not strata:
        raise ValueError("expected at least one estimate, got none; measure some task first")
    if len(strata) == 1:
        return strata[0]
    count = len(strata)
    mean = math.fsum(s.estimate for s in strata) / count
    below = math.hypot(*(s.estimate - s.low for s in strata)) / count
    above = math.hypot(*(s.high - s.estimate for s in strata)) / count
    return Interval(
        mean,
        mean - below,
        mean + above,
        sum(s.n for s in strata),
        count**2 / math.fsum(1 / s.effective_n for s in strata),
        failed=sum(s.failed for s in strata),
        unit=strata[0].unit,
    )


def above_chance(interval: Interval, chance: float) -> Interval:
    """Return an accuracy less what guessing gets; below 0 where it is worse than guessing.

    Args:
        interval: The accuracy.
        chance: The expected score of a guess, from 0 to 1.
    """
    return replace(
        interval,
        estimate=interval.estimate - chance,
        low=interval.low - chance,
        high=interval.high - chance,
    )


def retention(patched: Interval, base: Interval) -> Interval:
    """Return `patched / base` for independent estimates, with an interval from their intervals.

    MOVER-R (Donner & Zou 2012, after Newcombe 1998): each bound of the ratio takes from either
    estimate the distance to the bound that matters, so Wilson's asymmetry is kept. For positively
    correlated estimates it is conservative.

    Args:
        patched: An estimate such as accuracy at a long length; above chance, it may be negative.
        base: The estimate to compare with, such as the plain model's within its trained length;
            not negative.

    Returns:
        The ratio. The upper bound is `inf` if the base's interval reaches zero. The estimate is
        `inf` if the base is zero, and NaN if both are. `n` and `effective_n` are the smaller ones.

    Raises:
        ValueError: If the base is negative, or an estimate NaN.
    """
    if math.isnan(patched.estimate) or not base.estimate >= 0:
        raise ValueError(
            f"expected a number over at least 0, got {patched.estimate} and {base.estimate}; "
            "give intervals of accuracy"
        )
    if patched.estimate < 0:
        mirrored = retention(_negated(patched), base)
        return replace(_negated(mirrored), n=mirrored.n)
    product = patched.estimate * base.estimate
    # Below, (A - sqrt(A² - BC)) / C is written B / (A + sqrt(A² - BC)), which allows C = 0.
    b = _squared_margin(patched.estimate, patched.low)
    # The bound farther from 0 goes with the smaller base: below 0, that is the lower one.
    base_bound = base.high if b >= 0 else base.low
    c = _squared_margin(base.estimate, base_bound)
    divisor = product + math.sqrt(max(product**2 - b * c, 0.0))
    low = b / divisor if divisor > 0 else 0.0
    if b < 0 and c <= 0:
        low = -math.inf
    b, c = _squared_margin(patched.estimate, patched.high), _squared_margin(base.estimate, base.low)
    high = (product + math.sqrt(max(product**2 - b * c, 0.0))) / c if c > 0 else math.inf
    if base.estimate > 0:
        ratio = patched.estimate / base.estimate
    else:
        ratio = math.inf if patched.estimate > 0 else math.nan
    return Interval(
        ratio,
        low,
        high,
        min(patched.n, base.n),
        min(patched.effective_n, base.effective_n),
        failed=patched.failed + base.failed,
    )


def effective_length(measured: Mapping[int, Interval], threshold: float) -> tuple[int | None, str]:
    """Return the longest length at and below which all lower bounds clear the threshold.

    Lengths are tested in a fixed order and the first that does not clear ends the test, so the
    chance of naming too long a length stays that of one bound, however many lengths there are.

    Args:
        measured: For each length in tokens the interval of accuracy or of retention.
        threshold: What has to be cleared, in the same unit.

    Returns:
        The length, or None if not even the shortest clears; and the reason it is no longer:
        "passes all", "n too small at …" where the estimate clears but its bound does not,
        "fails at …" or "undefined at …".

    Raises:
        ValueError: If nothing was measured.
    """
    if not measured:
        raise ValueError("expected at least one measured length, got none; measure some first")
    longest = None
    for length, interval in sorted(measured.items()):
        if interval.low >= threshold:
            longest = length
            continue
        at = f"at {length:,} tokens"
        if math.isnan(interval.estimate):
            return longest, f"undefined {at}: nothing to compare with"
        value = f"{interval.estimate:.1%}"
        if interval.estimate >= threshold:
            bound = f"lower bound {interval.low:.1%} does not (n = {interval.n:g})"
            return longest, f"n too small {at}: {value} clears {threshold:.1%}, {bound}"
        return longest, f"fails {at}: {value} is below {threshold:.1%}"
    return longest, "passes all"


def _negated(interval: Interval) -> Interval:
    return replace(interval, estimate=-interval.estimate, low=-interval.high, high=-interval.low)


def _squared_margin(estimate: float, bound: float) -> float:
    """Return `estimate² - (estimate - bound)²`, without the cancellation."""
    return bound * (2 * estimate - bound)
