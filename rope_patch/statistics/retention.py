"""Retention of a base score at a length, and the effective length."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rope_patch.statistics.intervals import Interval


def retention(patched: Interval, base: Interval) -> Interval:
    """Return `patched / base` for independent estimates, with an interval from their intervals.

    MOVER-R (Donner & Zou 2012, after Newcombe 1998): each bound of the ratio takes from either
    estimate the distance to the bound that matters, so Wilson's asymmetry is kept. For positively
    correlated estimates it is conservative.

    Args:
        patched: A non-negative estimate, such as accuracy at a long length.
        base: The estimate to compare with, such as the plain model's within its trained length.

    Returns:
        The ratio. The upper bound is `inf` if the base's interval reaches zero. The estimate is
        `inf` if the base is zero, and NaN if both are. `n` and `effective_n` are the smaller ones.

    Raises:
        ValueError: If an estimate is negative or NaN.
    """
    if not (patched.estimate >= 0 and base.estimate >= 0):
        raise ValueError(
            f"expected estimates of at least 0, got {patched.estimate} and {base.estimate}; "
            "give intervals of accuracy"
        )
    product = patched.estimate * base.estimate
    # Below, (A - sqrt(A² - BC)) / C is written B / (A + sqrt(A² - BC)), which allows C = 0.
    b, c = _squared_margin(patched.estimate, patched.low), _squared_margin(base.estimate, base.high)
    divisor = product + math.sqrt(max(product**2 - b * c, 0.0))
    low = b / divisor if divisor > 0 else 0.0
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


def _squared_margin(estimate: float, bound: float) -> float:
    """Return `estimate² - (estimate - bound)²`, without the cancellation."""
    return bound * (2 * estimate - bound)
