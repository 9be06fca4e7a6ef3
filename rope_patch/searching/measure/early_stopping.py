"""When to give a candidate up before all samples are scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ALPHA = 0.005  # how often, at each look, a candidate that is as good as the best is given up
MIN_GROUPS = 3  # groups, to know how much they differ


def predicted_deficit(
    candidate_nll: Mapping[int, float],
    best_nll: Sequence[float],
    weights: Sequence[float],
    groups: Sequence[str],
) -> float | None:
    """How far behind a candidate will end, if that is beyond hope; None while there is some.

    A candidate is compared with the best complete one on the samples that both were scored on, so
    what makes a sample hard for both cancels. It is given up where its mean loss is further behind
    than Student's t allows by chance, one-sided, at `ALPHA`: groups are what varies, and the more
    of all groups are done, the less the rest can change (the correction for a finite population).
    The best one may have its hardest samples still before it, which is known: it must be ahead by
    as much, too, if the candidate did on the rest as it has done so far. And a candidate that would
    lose with no loss at all on the rest is given up at any time.

    The risk: with three looks, a candidate that would have ended level with the best is given up in
    at most about three searches of two hundred, one that would have ended ahead in fewer, and then
    the search keeps the one that it had. Groups whose losses differ wildly make t a poor guide; few
    groups give little up, for t is wide there.

    Args:
        candidate_nll: The candidate's nats, by sample, of those scored so far.
        best_nll: The best one's, of every sample.
        weights: Of every sample.
        groups: Of every sample.

    Returns:
        By how many nats it ends behind, one standard error on the pessimistic side.
    """
    from scipy import special

    done, everything = sum(weights[i] for i in candidate_nll), sum(weights)
    total = math.fsum(w * nats for w, nats in zip(weights, best_nll, strict=True)) / everything
    own = math.fsum(weights[i] * nats for i, nats in candidate_nll.items())
    mean = (own - math.fsum(weights[i] * best_nll[i] for i in candidate_nll)) / done
    residuals: dict[str, float] = {}
    for i, nats in candidate_nll.items():
        residual = weights[i] * (nats - best_nll[i] - mean)
        residuals[groups[i]] = residuals.get(groups[i], 0.0) + residual
    count = len(residuals)
    spread = math.fsum(part**2 for part in residuals.values()) * count / max(count - 1, 1)
    rest = max(1 - done / everything, 1 / len(set(groups)))
    error = math.sqrt(spread * rest) / done
    if own / everything > total:
        return max(mean, own / everything - total) + error
    if count < MIN_GROUPS:
        return None
    limit = float(special.stdtrit(count - 1, 1 - ALPHA)) * error
    return mean + error if min(mean, own / done - total) > limit else None
