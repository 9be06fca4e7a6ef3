"""Which of several methods to use: a rule on what was measured, without a model.

In this order: what cannot be told from the best at the target length; of these, what cannot be
told from the smallest price within the trained length; of these, what the most engines run without
this package; of these, the simplest. Or nothing, where nothing holds up at the length.
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

# A method holds if it keeps this share of the answers that the plain model gets right.
MIN_RETAINED_SHARE = 0.5


@dataclass(frozen=True)
class MeasuredVariant:
    """A method and what was measured of it.

    Attributes:
        name: What users call it.
        long: At the target length.
        short: Answers within the trained length, on the samples that all have.
        prose: Documents within the trained length; None where there are none.
        lost: Engines that cannot run it, though they run the plain model.
        options: How many numbers it needs besides the length; -1 for the plain model.
        dynamic: Whether its rotation follows the length.
    """

    name: str
    long: Scores
    short: Scores
    prose: Scores | None = None
    lost: int = 0
    options: int = 0
    dynamic: bool = False


@dataclass(frozen=True)
class Choice:
    """What is to be used and why.

    Attributes:
        name: The method; None where nothing is to be recommended.
        verdict: "use", "nothing holds", or "cannot answer": the plain model fails within its own
            trained length, so nothing could be told.
        best: The smallest loss at the target length.
        ties: What cannot be told from it, itself with it.
        behind: By name, how each differs from the best at the target length.
        price: By name, how each differs from the plain model within the trained length, on answers
            and on prose.
        retained_share: Of the chosen, or else of the best: the share of the plain model's answers
            within the trained length that it gets right at the target length; None where that
        cannot be said.
        information_gain: Of the best, by how many nats a true answer is likelier than one that the
            text does not say; None where it was not measured.
        reasons: The steps that led there, a sentence each.
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


def lowest_loss(contenders: Sequence[MeasuredVariant]) -> MeasuredVariant:
    """The one with the smallest loss at the target length."""
    return min(contenders, key=lambda one: one.long.mean)


def choose(
    contenders: Sequence[MeasuredVariant], plain: MeasuredVariant, control: Scores | None = None
) -> Choice:
    """Applies the rule.

    All that contenders are compared by is paired: the same samples, differences by text. Intervals
    are 95% each, not for all comparisons together, and the best of several looks better on the
    samples that it was chosen by than it is.

    Args:
        contenders: All on the same samples.
        plain: The model as it is: what prices are held against; need not be a contender.
        control: The best contender's scores of the control, see `gain_over_control`.

    Raises:
        ValueError: No contenders.
    """
    if not contenders:
        raise ValueError("expected contenders to choose from, got none: measure some first")
    best = lowest_loss(contenders)
    behind = {one.name: score_difference(one.long, best.long) for one in contenders}
    price = {one.name: _price(one, plain) for one in contenders}
    ties = [one for one in contenders if one is best or not behind[one.name].is_worse]
    names = tuple(one.name for one in ties)
    informed = None if control is None else gain_over_control(best.long, control)
    base = plain.short.accuracy_interval()
    kept = {one.name: _retained_share(one, base) for one in ties}
    reasons = [
        f"best at the length: {best.name}" + _ties_text(names, best.name, "cannot be told apart")
    ]

    def choice(one: MeasuredVariant | None, verdict: str) -> Choice:
        shown = kept[best.name if one is None else one.name]
        name = None if one is None else one.name
        told = tuple(reasons)
        return Choice(name, verdict, best.name, names, behind, price, shown, informed, told)

    if informed is not None and not informed.low > 0:
        reasons.append(
            "with it, a true answer is no likelier than one that the text does not say "
            f"({informed.estimate:+.3f} nats, {informed.low:+.3f} to {informed.high:+.3f})"
        )
        return choice(None, "nothing holds")
    holding = [
        one
        for one in ties
        if (share := kept[one.name]) is None or share.estimate >= MIN_RETAINED_SHARE
    ]
    if not holding:
        share = kept[best.name]
        reasons.append(
            f"it keeps {share.estimate:.0%} of the answers that the plain model gets right within "
            f"its trained length ({share.low:.0%} to {share.high:.0%}), less than {MIN_RETAINED_SHARE:.0%}"
            if share is not None
            else "none keeps enough"
        )
        return choice(None, "nothing holds")
    left = _cheapest(holding, plain, reasons)
    fewest = min(one.lost for one in left)
    if len(left) > 1 and any(one.lost > fewest for one in left):
        left = [one for one in left if one.lost == fewest]
        reasons.append("most engines run without this package: " + _join_names(left))
    chosen = min(left, key=lambda one: (one.options, one.dynamic, one.long.mean))
    if len(left) > 1:
        reasons.append(f"the simplest of these: {chosen.name}")
    free = [one.name for one in holding if one.short.nll == plain.short.nll[: len(one.short)]]
    if free and chosen.name not in free:
        reasons.append(f"where short texts matter most: {free[0]}, which leaves them as they are")
    return choice(chosen, "use")


def _cheapest(
    left: list[MeasuredVariant], plain: MeasuredVariant, reasons: list[str]
) -> list[MeasuredVariant]:
    """Those that cannot be told from the smallest price within the trained length."""
    least = min(left, key=lambda one: _short_context_cost(one, plain))
    found = [
        one
        for one in left
        if not score_difference(one.short, least.short).is_worse
        and (
            one.prose is None
            or least.prose is None
            or not score_difference(one.prose, least.prose).is_worse
        )
    ]
    if len(left) > 1:
        names = [one.name for one in found]
        reasons.append(
            f"the smallest price within the trained length: {least.name}"
            + _ties_text(names, least.name, "no dearer that one could tell")
        )
    return found


def _short_context_cost(one: MeasuredVariant, plain: MeasuredVariant) -> float:
    """Nats that short context loses, answers and prose weighing the same."""
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


def _retained_share(one: MeasuredVariant, base: Interval | None) -> Interval | None:
    """The share of the plain model's short answers; None where that has too few to keep any."""
    right = one.long.accuracy_interval()
    if base is None or right is None or not base.low > 0:
        return None
    return retention(right, base)


def _ties_text(names: Sequence[str], best: str, how: str) -> str:
    others = [name for name in names if name != best]
    return f"; {how}: {', '.join(others)}" if others else ""


def _join_names(contenders: Sequence[MeasuredVariant]) -> str:
    return ", ".join(one.name for one in contenders)
