"""Means over tasks, retention of a base score at a length, and the usable length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rope_patch.statistics.intervals import Interval
from rope_patch.statistics.power import least_number

USABLE_SHARE = 0.85  # of the short-context score at a usable length; NoLiMa's
_MAX_TEXTS = 2000  # texts a task that are tried to decide whether a length is usable


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


@dataclass(frozen=True)
class UsableLength:
    """The longest length up to which a share of a score is kept, with its 95% interval.

    Attributes:
        lengths: The measured lengths in tokens, in order.
        estimate: The longest of them that the isotonic fit calls kept; None if there is none. It
            lies in the interval.
        low: The interval's lower end: the longest length at and below which the share is shown to
            be kept; None if that is not even shown at the shortest.
        high: The interval's upper end, which lies beyond the usable length: the shortest length at
            which the share is shown to be lost; None if it is shown nowhere.
        texts_needed: About how many texts a task would show whether `undecided` is usable, were
            the scores as measured; None where no number would, or nobody asked.
    """

    lengths: tuple[int, ...]
    estimate: int | None
    low: int | None
    high: int | None
    texts_needed: int | None = None

    @property
    def undecided(self) -> int | None:
        """Return the shortest length that is shown to be neither usable nor unusable."""
        above = self.lengths if self.low is None else [n for n in self.lengths if n > self.low]
        return next((n for n in above if self.high is None or n < self.high), None)

    def is_beyond(self, length: int) -> bool:
        """Return whether a measured length beyond this one is shown to be usable."""
        return self.low is not None and self.low > length

    @property
    def stated(self) -> int | None:
        """Return the length to state: the estimate, but without an upper end no more than shown."""
        return self.low if self.high is None or self.low is None else self.estimate

    @property
    def text(self) -> str:
        """Return the length without a unit: 8,192, at least 4,096, below 4,096, not shown."""
        if self.high == self.lengths[0]:
            return f"below {self.high:,}"
        if self.stated is None:
            return "not shown"
        return f"at least {self.low:,}" if self.high is None else f"{self.stated:,}"

    @property
    def interval_text(self) -> str:
        """Return the interval, 4,096 to 12,288, or what is said where it has one end or none."""
        takes = f"takes {self.texts_needed:,} texts" if self.texts_needed else ""
        if self.low == self.lengths[-1]:
            return "the longest measured"
        if self.high == self.lengths[0]:
            return "the shortest measured"
        if self.low is None:
            below = "" if self.high is None else f"below {self.high:,}"
            return "; ".join(filter(None, (below, takes)))
        if self.high is None:
            return f"{self.undecided:,} {takes or 'is undecided'}"
        return f"{self.low:,} to {self.high:,}"

    def __str__(self) -> str:
        unit = "" if self.text == "not shown" else " tokens"
        note = f" ({self.interval_text})" if self.interval_text else ""
        return f"{self.text}{unit}{note}"


def usable_length(kept: Mapping[int, Interval], share: float) -> UsableLength:
    """Return the longest length up to which a share is kept, with its interval.

    Both ends invert tests with half the error each, whatever the number of lengths. For the lower
    one, lengths are tested from the shortest on, and the first that is not shown to be kept ends
    the test. For the upper one, they are tested from the longest down; the length that ends the
    lower test counts, too. So the interval asks nothing of the curve between measured lengths,
    except that what is lost at one of them is not usable beyond it. A bootstrap over few texts that
    are all right would have no width; the bounds that are given here are those of exact tests.

    Args:
        kept: For each length in tokens the interval of what is kept there, finite.
        share: What has to be kept, in the same unit.

    Raises:
        ValueError: If nothing was measured, or an estimate is not finite.
    """
    if not kept or not all(math.isfinite(interval.estimate) for interval in kept.values()):
        raise ValueError(
            f"expected a finite estimate at one length at least, got {dict(kept)}; measure some"
        )
    lengths = sorted(kept)
    shown = list(takewhile(lambda length: kept[length].low >= share, lengths))
    lost = list(takewhile(lambda length: kept[length].high < share, reversed(lengths)))
    following = lengths[len(shown) : len(shown) + 1]
    lost += [length for length in following if kept[length].high < share]
    fit = _non_increasing([kept[n].estimate for n in lengths], [kept[n].n for n in lengths])
    # Pooling rounds: 17 of 20 are 85%.
    estimated = [n for n, value in zip(lengths, fit, strict=True) if value >= share - 1e-12]
    high = min(lost, default=None)
    # A fit may pool a length that is shown to be lost with better ones beyond it.
    inside = [n for n in estimated if high is None or n < high]
    return UsableLength(tuple(lengths), max(inside, default=None), max(shown, default=None), high)


def name_texts_needed(
    usable: UsableLength, share: float, kept: Callable[[int, int], Interval | None]
) -> UsableLength:
    """Return a usable length with the number of texts that would decide the first unsure length.

    Args:
        usable: The usable length.
        share: What has to be kept.
        kept: The interval of what is kept at a length in tokens if there were so many texts with
            the same scores; None if there is none.
    """
    length = usable.undecided
    if length is None:
        return usable
    undecided = length

    def is_enough(texts: int) -> bool:
        interval = kept(undecided, texts)
        return interval is not None and not interval.low < share <= interval.high

    return replace(usable, texts_needed=least_number(is_enough, 2, _MAX_TEXTS))


def _non_increasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the least-squares fit that never rises, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] < block[0]:
            mean, total, count = blocks.pop()
            both = total + block[1]
            mean = (mean * total + block[0] * block[1]) / both
            block = (mean, both, count + block[2])
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]


def _negated(interval: Interval) -> Interval:
    return replace(interval, estimate=-interval.estimate, low=-interval.high, high=-interval.low)


def _squared_margin(estimate: float, bound: float) -> float:
    """Return `estimate² - (estimate - bound)²`, without the cancellation."""
    return bound * (2 * estimate - bound)
