"""Repeated looks at growing data: how much of the error rate each look may spend."""

from __future__ import annotations


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
