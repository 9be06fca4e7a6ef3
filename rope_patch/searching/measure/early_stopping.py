"""Early stopping: when to give up a candidate before all samples are scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ALPHA = 0.005  # error rate of each look: an equally good candidate is stopped this often
MIN_GROUPS = 6  # fewer show nothing, see `statistics.mean_test`


def predicted_deficit(
    candidate_nll: Mapping[int, float],
    best_nll: Sequence[float],
    weights: Sequence[float],
    groups: Sequence[str],
) -> float | None:
    """Return the predicted final deficit if the candidate should be stopped, else None.

    The candidate is compared with the best complete one on the samples that both were scored on, so
    what makes a sample hard for both cancels. It is stopped if its mean loss is further behind than
    a one-sided Student's t-test at `ALPHA` allows. Groups are the units of the test, with the
    correction for a finite population: the more groups are scored, the less the rest can change.
    The best candidate must also lead by as much if the rest of the samples score as the first ones
    did, because the best one's remaining samples may be the hard ones. A candidate that would lose
    even with no loss at all on the rest is stopped at once.

    The risk: with three looks, a candidate that would have ended level with the best is stopped in
    at most about three searches of two hundred, one that would have ended ahead in fewer. The
    search then keeps its present best. Groups whose losses differ wildly make t a poor guide. Below
    six groups a candidate is stopped only if it cannot win.

    Args:
        candidate_nll: The candidate's nats, by sample, of those scored so far.
        best_nll: The best candidate's nats of all samples.
        weights: The weights of all samples.
        groups: The groups of all samples.

    Returns:
        The nats by which the candidate ends behind, pessimistic by one standard error.
    """
    from scipy import special

    scored_weight, total_weight = sum(weights[i] for i in candidate_nll), sum(weights)
    best_mean = (
        math.fsum(w * nats for w, nats in zip(weights, best_nll, strict=True)) / total_weight
    )
    candidate_sum = math.fsum(weights[i] * nats for i, nats in candidate_nll.items())
    mean_deficit = (
        candidate_sum - math.fsum(weights[i] * best_nll[i] for i in candidate_nll)
    ) / scored_weight
    residuals: dict[str, float] = {}
    for i, nats in candidate_nll.items():
        residual = weights[i] * (nats - best_nll[i] - mean_deficit)
        residuals[groups[i]] = residuals.get(groups[i], 0.0) + residual
    count = len(residuals)
    variance = math.fsum(part**2 for part in residuals.values()) * count / max(count - 1, 1)
    remaining_share = max(1 - scored_weight / total_weight, 1 / len(set(groups)))
    standard_error = math.sqrt(variance * remaining_share) / scored_weight
    if candidate_sum / total_weight > best_mean:
        return max(mean_deficit, candidate_sum / total_weight - best_mean) + standard_error
    if count < MIN_GROUPS:
        return None
    limit = float(special.stdtrit(count - 1, 1 - ALPHA)) * standard_error
    return (
        mean_deficit + standard_error
        if min(mean_deficit, candidate_sum / scored_weight - best_mean) > limit
        else None
    )
