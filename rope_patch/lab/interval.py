"""Intervals of scores that were measured on the same samples with several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rope_patch.statistics import Interval, accuracy, clustered_mean

Scores = Sequence[Sequence[float]]  # `[seeds][samples]`


def seeded_mean(scores: Scores, *, is_share: bool = False) -> Interval:
    """Return the mean of scores, with an interval over samples and over seeds.

    The two are independent sources of chance, so the squares of their half widths add up (MOVER,
    Zou & Donner 2008): one half width is that of the samples' means over seeds, the other that of
    the seeds' means over samples, both by Student's t, or Wilson's for shares of samples. With
    three seeds t is 4.3, so their part is wide, as it should be. A single seed says nothing of
    others: its interval holds for the trained model alone.

    Args:
        scores: For each seed the score of each sample.
        is_share: Whether scores are shares of answers, from 0 to 1.

    Raises:
        ValueError: There are no scores, or seeds were measured on different samples.
    """
    if not scores or not scores[0] or len({len(row) for row in scores}) > 1:
        raise ValueError(
            f"expected scores of the same samples for each seed, got {[len(r) for r in scores]}"
        )
    by_sample = [math.fsum(column) / len(scores) for column in zip(*scores, strict=True)]
    over_samples = (
        accuracy([min(max(score, 0.0), 1.0) for score in by_sample])
        if is_share
        else clustered_mean(by_sample, range(len(by_sample))).mean
    )
    count = len(scores) * len(by_sample)
    mean = math.fsum(by_sample) / len(by_sample)
    low, high = mean - over_samples.low, over_samples.high - mean
    if len(scores) > 1:
        by_seed = [math.fsum(row) / len(row) for row in scores]
        half = clustered_mean(by_seed, range(len(by_seed))).mean.half_width
        low, high = math.hypot(low, half), math.hypot(high, half)
    bounds = [mean - low, mean + high]
    if is_share:
        bounds = [max(bounds[0], 0.0), min(bounds[1], 1.0)]
    return Interval(mean, bounds[0], bounds[1], count, len(by_sample))


def seeded_difference(first: Scores, second: Scores) -> Interval:
    """Return the mean difference of two sets of scores, paired by seed and sample.

    Seeds give the same data and first weights, and samples the same texts, so what both have in
    common cancels.

    Args:
        first: For each seed the score of each sample.
        second: What is subtracted; of the same seeds and as many samples.
    """
    return seeded_mean(
        [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    )
