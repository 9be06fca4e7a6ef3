"""The decision rule: which of several measured methods to use.

The steps are: keep the methods that cannot be told from the best at the target length; of these,
those that cannot be told from the smallest price within the trained length; of these, those that
most engines run without this package; of these, the simplest. If no method holds up at the target
length, none is recommended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rope_patch.recommending.scores import (
    ScoreDifference,
    Scores,
    gain_over_control,
    score_difference,
)
from rope_patch.statistics import Interval, retention

# A method holds up if it retains this share of the plain model's accuracy.
MIN_RETAINED_SHARE = 0.5


@dataclass(frozen=True)
class MeasuredVariant:
    """A variant and its scores.

    Attributes:
        name: The variant's name.
        long: Scores at the target length.
        short: Scores of answers within the trained length.
        prose: Scores of documents within the trained length, if any.
        engines_lost: Number of engines that run the plain model and not this variant.
        option_count: How many numbers it needs besides the length; -1 for the plain model.
        dynamic: Whether its rotation follows the length.
    """

    name: str
    long: Scores
    short: Scores
    prose: Scores | None = None
    engines_lost: int = 0
    option_count: int = 0
    dynamic: bool = False


@dataclass(frozen=True)
class Choice:
    """The decision and its reasons.

    Attributes:
        name: The recommended method, or None.
        verdict: "use", "nothing holds", or "cannot answer": the plain model fails within its own
            trained length, so methods cannot be compared.
        best: The method with the smallest loss at the target length.
        ties: Methods that cannot be told from the best, and the best itself.
        behind: By name, the difference from the best at the target length.
        price: By name, the differences from the plain model within the trained length, on answers
            and on prose.
        retained_share: Accuracy of the chosen method (else of the best) at the target length / the
            plain model's within the trained length; None if that is too small to divide by.
        information_gain: Of the best, the nats by which a true answer is likelier than one that
            the text does not have; None if it was not measured.
        reasons: The steps of the decision, a sentence each.
    """

    name: str | None
    verdict: str
    best: str | None = None
    ties: tuple[str, ...] = ()
    behind: dict[str, ScoreDifference] = field(default_factory=dict)
    price: dict[str, tuple[ScoreDifference, ScoreDifference | None]] = field(default_factory=dict)
    retained_share: Interval | None = None
    information_gain: Interval | None = None
    reasons: tuple[str, ...] = ()


def lowest_loss(variants: Sequence[MeasuredVariant]) -> MeasuredVariant:
    """Return the variant with the smallest loss at the target length."""
    return min(variants, key=lambda one: one.long.mean)


def choose(
    variants: Sequence[MeasuredVariant], plain: MeasuredVariant, control: Scores | None = None
) -> Choice:
    """Apply the rule.

    All comparisons are paired: the same samples, differences by text. Intervals are 95% each, not
    for all comparisons together, and the best of several looks better on the samples that it was
    chosen by than it is.

    Args:
        variants: Variants measured on the same samples.
        plain: The plain model, against which prices are measured; need not be in `variants`.
        control: The best variant's scores of the control, see `gain_over_control`.

    Raises:
        ValueError: There are no variants.
    """
    if not variants:
        raise ValueError("expected contenders to choose from, got none: measure some first")
    best = lowest_loss(variants)
    behind = {one.name: score_difference(one.long, best.long) for one in variants}
    price = {one.name: _price(one, plain) for one in variants}
    ties = [one for one in variants if one is best or not behind[one.name].is_worse]
    tie_names = tuple(one.name for one in ties)
    information_gain = None if control is None else gain_over_control(best.long, control)
    plain_accuracy = plain.short.accuracy_interval()
    shares = {one.name: _retained_share(one, plain_accuracy) for one in ties}
    reasons = [
        f"best at the length: {best.name}"
        + _ties_text(tie_names, best.name, "cannot be told apart")
    ]

    def choice(one: MeasuredVariant | None, verdict: str) -> Choice:
        shown = shares[best.name if one is None else one.name]
        name = None if one is None else one.name
        steps = tuple(reasons)
        return Choice(
            name, verdict, best.name, tie_names, behind, price, shown, information_gain, steps
        )

    if information_gain is not None and not information_gain.low > 0:
        reasons.append(
            "with it, a true answer is no likelier than one that the text does not say "
            f"({information_gain.estimate:+.3f} nats, {information_gain.low:+.3f} to "
            f"{information_gain.high:+.3f})"
        )
        return choice(None, "nothing holds")
    holding = [
        one
        for one in ties
        if (share := shares[one.name]) is None or share.estimate >= MIN_RETAINED_SHARE
    ]
    if not holding:
        share = shares[best.name]
        reasons.append(
            f"it keeps {share.estimate:.0%} of the answers that the plain model gets right within "
            f"its trained length ({share.low:.0%} to {share.high:.0%}), less than "
            f"{MIN_RETAINED_SHARE:.0%}"
            if share is not None
            else "none keeps enough"
        )
        return choice(None, "nothing holds")
    remaining = _cheapest(holding, plain, reasons)
    fewest = min(one.engines_lost for one in remaining)
    if len(remaining) > 1 and any(one.engines_lost > fewest for one in remaining):
        remaining = [one for one in remaining if one.engines_lost == fewest]
        reasons.append("most engines run without this package: " + _join_names(remaining))
    chosen = min(remaining, key=lambda one: (one.option_count, one.dynamic, one.long.mean))
    if len(remaining) > 1:
        reasons.append(f"the simplest of these: {chosen.name}")
    free = [one.name for one in holding if one.short.nll == plain.short.nll[: len(one.short)]]
    if free and chosen.name not in free:
        reasons.append(f"where short texts matter most: {free[0]}, which leaves them as they are")
    return choice(chosen, "use")


def _cheapest(
    variants: list[MeasuredVariant], plain: MeasuredVariant, reasons: list[str]
) -> list[MeasuredVariant]:
    """Return the variants that cannot be told from the smallest price; add the reason."""
    lowest = min(variants, key=lambda one: _short_context_cost(one, plain))
    cheapest = [
        one
        for one in variants
        if not score_difference(one.short, lowest.short).is_worse
        and (
            one.prose is None
            or lowest.prose is None
            or not score_difference(one.prose, lowest.prose).is_worse
        )
    ]
    if len(variants) > 1:
        names = [one.name for one in cheapest]
        reasons.append(
            f"the smallest price within the trained length: {lowest.name}"
            + _ties_text(names, lowest.name, "no dearer that one could tell")
        )
    return cheapest


def _short_context_cost(one: MeasuredVariant, plain: MeasuredVariant) -> float:
    """Return the nats lost within the trained length, where answers and prose weigh the same."""
    costs = [one.short.mean - plain.short.first(len(one.short)).mean]
    if one.prose is not None and plain.prose is not None:
        costs.append(one.prose.mean - plain.prose.first(len(one.prose)).mean)
    return math.fsum(costs) / len(costs)


def _price(
    one: MeasuredVariant, plain: MeasuredVariant
) -> tuple[ScoreDifference, ScoreDifference | None]:
    prose = None
    if one.prose is not None and plain.prose is not None:
        prose = score_difference(one.prose, plain.prose)
    return score_difference(one.short, plain.short), prose


def _retained_share(one: MeasuredVariant, plain_accuracy: Interval | None) -> Interval | None:
    """Return the accuracy as a share of the plain model's; None if that may be zero."""
    accuracy = one.long.accuracy_interval()
    if plain_accuracy is None or accuracy is None or not plain_accuracy.low > 0:
        return None
    return retention(accuracy, plain_accuracy)


def _ties_text(names: Sequence[str], best: str, how: str) -> str:
    others = [name for name in names if name != best]
    return f"; {how}: {', '.join(others)}" if others else ""


def _join_names(variants: Sequence[MeasuredVariant]) -> str:
    return ", ".join(one.name for one in variants)
