"""Decide which of several measured methods to use, by their scores.

In come scores of each variant (`Scores`: nats, right answers and texts, by sample); out comes a
`Choice` with its reasons. The rule keeps the methods that cannot be told from the best at the
target length; of these, those that cannot be told from the smallest price within the trained
length; of these, those that most engines run without this package; of these, the simplest. If no
method holds up at the target length, it recommends none.

Two variants are told apart by the paired differences of their scores on the same samples
(`score_difference`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rope_patch.recommending.variants import PLAIN, Variant
from rope_patch.statistics import (
    SIGNIFICANCE_LEVEL,
    USABLE_SHARE,
    Interval,
    MeanTest,
    Outcome,
    PairedTest,
    UsableLength,
    Verdict,
    accuracy,
    bootstrap_mean,
    clopper_pearson,
    family_verdicts,
    grown,
    mean_test,
    name_texts_needed,
    paired_difference,
    retention,
    usable_length,
    wilson,
)
from rope_patch.utils.terminal import SignedFormat

NATS = SignedFormat(3)

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
        on_plain: By name, what is shown of each measured method beside the plain model at the
            target length, as in the report of `compare`.
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
    on_plain: dict[str, Verdict] = field(default_factory=dict)


def lowest_loss(variants: Sequence[MeasuredVariant]) -> MeasuredVariant:
    """Return the variant with the smallest loss at the target length."""
    return min(variants, key=lambda variant: variant.long.mean)


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
    behind = {variant.name: score_difference(variant.long, best.long) for variant in variants}
    price = {variant.name: _price(variant, plain) for variant in variants}
    ties = [variant for variant in variants if variant is best or not behind[variant.name].is_worse]
    tie_names = tuple(variant.name for variant in ties)
    information_gain = None if control is None else gain_over_control(best.long, control)
    plain_accuracy = plain.short.accuracy_interval()
    shares = {variant.name: _retained_share(variant, plain_accuracy) for variant in ties}
    reasons = [
        f"best at the length: {best.name}"
        + _ties_text(tie_names, best.name, "cannot be told apart")
    ]

    def choice(variant: MeasuredVariant | None, verdict: str) -> Choice:
        retained_share = shares[best.name if variant is None else variant.name]
        name = None if variant is None else variant.name
        steps = tuple(reasons)
        return Choice(
            name,
            verdict,
            best.name,
            tie_names,
            behind,
            price,
            retained_share,
            information_gain,
            steps,
        )

    if information_gain is not None and not information_gain.low > 0:
        reasons.append(
            "with it, a true answer is no likelier than one that the text does not say "
            f"({NATS.number(information_gain.estimate)} nats, "
            f"{NATS.range(information_gain.low, information_gain.high)})"
        )
        return choice(None, "nothing holds")
    usable_ties = [
        variant
        for variant in ties
        if (share := shares[variant.name]) is None or share.estimate >= MIN_RETAINED_SHARE
    ]
    if not usable_ties:
        share = shares[best.name]
        reasons.append(
            f"it keeps {share.estimate:.0%} of the answers that the plain model gets right within "
            f"its trained length ({share.low:.0%} to {min(share.high, 1):.0%}), less than "
            f"{MIN_RETAINED_SHARE:.0%}"
            if share is not None
            else "none keeps enough"
        )
        return choice(None, "nothing holds")
    remaining = _cheapest(usable_ties, plain, reasons)
    fewest = min(variant.engines_lost for variant in remaining)
    if len(remaining) > 1 and any(variant.engines_lost > fewest for variant in remaining):
        remaining = [variant for variant in remaining if variant.engines_lost == fewest]
        reasons.append("most engines run without this package: " + _join_names(remaining))
    chosen = min(remaining, key=_simplicity)
    if len(remaining) > 1:
        reasons.append(f"the simplest of these: {chosen.name}")
    lossless_names = [
        variant.name
        for variant in usable_ties
        if variant.short.nll == plain.short.nll[: len(variant.short)]
    ]
    if lossless_names and chosen.name not in lossless_names:
        reasons.append(
            f"where short texts matter most: {lossless_names[0]}, which leaves them as they are"
        )
    return choice(chosen, "use")


def _cheapest(
    variants: list[MeasuredVariant], plain: MeasuredVariant, reasons: list[str]
) -> list[MeasuredVariant]:
    """Return the variants that cannot be told from the smallest price; add the reason."""
    lowest = min(variants, key=lambda variant: _short_context_cost(variant, plain))
    cheapest = [
        variant
        for variant in variants
        if not score_difference(variant.short, lowest.short).is_worse
        and (
            variant.prose is None
            or lowest.prose is None
            or not score_difference(variant.prose, lowest.prose).is_worse
        )
    ]
    if len(variants) > 1:
        names = [variant.name for variant in cheapest]
        reasons.append(
            f"the smallest price within the trained length: {lowest.name}"
            + _ties_text(names, lowest.name, "no dearer that one could tell")
        )
    return cheapest


def _simplicity(variant: MeasuredVariant) -> tuple[int, bool, float]:
    """Return a key that sorts variants: fewest numbers first, static before dynamic, then loss."""
    return variant.option_count, variant.dynamic, variant.long.mean


def _short_context_cost(variant: MeasuredVariant, plain: MeasuredVariant) -> float:
    """Return the nats lost within the trained length, where answers and prose weigh the same."""
    costs = [variant.short.mean - plain.short.first(len(variant.short)).mean]
    if variant.prose is not None and plain.prose is not None:
        costs.append(variant.prose.mean - plain.prose.first(len(variant.prose)).mean)
    return math.fsum(costs) / len(costs)


def _price(
    variant: MeasuredVariant, plain: MeasuredVariant
) -> tuple[ScoreDifference, ScoreDifference | None]:
    prose = None
    if variant.prose is not None and plain.prose is not None:
        prose = score_difference(variant.prose, plain.prose)
    return score_difference(variant.short, plain.short), prose


def _retained_share(variant: MeasuredVariant, plain_accuracy: Interval | None) -> Interval | None:
    """Return the accuracy as a share of the plain model's; None if that may be zero."""
    accuracy = variant.long.accuracy_interval()
    if plain_accuracy is None or accuracy is None or not plain_accuracy.low > 0:
        return None
    return retention(accuracy, plain_accuracy)


def _ties_text(names: Sequence[str], best: str, relation: str) -> str:
    tied_names = [name for name in names if name != best]
    return f"; {relation}: {', '.join(tied_names)}" if tied_names else ""


def _join_names(variants: Sequence[MeasuredVariant]) -> str:
    return ", ".join(variant.name for variant in variants)


# Nats a token below which a difference does not matter: about 1% of perplexity.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Scores:
    """Scores on some samples, in their order.

    Attributes:
        nll: Mean nats for a scored token, by sample.
        hits: By sample, which answers were right; empty for prose.
        groups: By sample, its text.
    """

    nll: tuple[float, ...]
    hits: tuple[tuple[bool, ...], ...]
    groups: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.nll)

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.nll + other.nll, self.hits + other.hits, self.groups + other.groups)

    def first(self, count: int) -> Scores:
        """Return the scores of the first samples."""
        return Scores(self.nll[:count], self.hits[:count], self.groups[:count])

    @property
    def mean(self) -> float:
        """Return the mean nats for a scored token."""
        return math.fsum(self.nll) / len(self.nll)

    def flat_hits(self) -> tuple[list[float], list[str]]:
        """Return 1 or 0 for each answer, right or wrong, and its text."""
        pairs = zip(self.hits, self.groups, strict=True)
        answers = [(float(hit), group) for hits, group in pairs for hit in hits]
        return [hit for hit, _ in answers], [group for _, group in answers]

    def loss_interval(self) -> Interval:
        """Return the nats for a scored token with their 95% interval over texts."""
        return bootstrap_mean(_group_by_text(self.nll, self.groups))

    def accuracy_interval(self, *, exact: bool = False) -> Interval | None:
        """Return the share of right answers with its interval; None if there are no answers.

        Args:
            exact: Whether by Clopper and Pearson, as usable lengths need, instead of Wilson.
        """
        hits, groups = self.flat_hits()
        bounds = clopper_pearson if exact else wilson
        return accuracy(hits, groups, bounds=bounds) if hits else None


@dataclass(frozen=True)
class ScoreDifference:
    """The differences between two methods on the same samples, with 95% intervals.

    Attributes:
        test: Nats by which the first is worse, tested over texts.
        answers: Share of answers by which the first is better; None if there are no answers.
    """

    test: MeanTest
    answers: PairedTest | None

    @property
    def nll(self) -> Interval:
        """Return the nats by which the first is worse; without bounds below six texts."""
        return self.test.mean

    @property
    def hits(self) -> Interval | None:
        """Return the difference of the shares of right answers; None if there are no answers."""
        return None if self.answers is None else self.answers.difference

    @property
    def is_worse(self) -> bool:
        """Return whether the first is shown to be worse than the second; never below six texts."""
        answers = self.answers
        if (
            answers is not None
            and answers.p_value < SIGNIFICANCE_LEVEL
            and answers.losses > answers.wins
        ):
            return True
        is_shown = Verdict(self.test, self.test.p_value).outcome is Outcome.WORSE
        return is_shown and self.nll.estimate > NEGLIGIBLE


def score_difference(first: Scores, second: Scores) -> ScoreDifference:
    """Return how the first differs from the second, on the samples that both scores cover."""
    count = min(len(first), len(second))
    first, second = first.first(count), second.first(count)
    differences = [a - b for a, b in zip(first.nll, second.nll, strict=True)]
    test = mean_test(differences, first.groups)
    hits, groups = first.flat_hits()
    if not hits:
        return ScoreDifference(test, None)
    return ScoreDifference(test, paired_difference(hits, second.flat_hits()[0], groups))


def gain_over_control(plain: Scores, control: Scores) -> Interval:
    """Return the nats by which a true answer is likelier than one that the text does not have.

    Args:
        plain: Scores of texts with their answers.
        control: Scores of these texts without the answers, or with others in their place.

    Raises:
        ValueError: The control is of other texts.
    """
    true, false = _mean_by_text(plain), _mean_by_text(control)
    differences = [false[group] - true[group] for group in true if group in false]
    if not differences:
        raise ValueError("expected the control of the same texts, got none of them")
    return mean_test(differences, range(len(differences))).mean


def _group_by_text(values: Sequence[float], groups: Sequence[str]) -> list[list[float]]:
    by_text: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        by_text.setdefault(group, []).append(value)
    return list(by_text.values())


def _mean_by_text(scores: Scores) -> dict[str, float]:
    """Return the mean nats for a scored token of each text."""
    by_text = _group_by_text(scores.nll, scores.groups)
    means = (math.fsum(values) / len(values) for values in by_text)
    return dict(zip(dict.fromkeys(scores.groups), means, strict=True))


@dataclass
class VariantScores:
    """The scores of a variant.

    Attributes:
        variant: The variant.
        engines: Engines that run it without this package.
        long: Scores at the target length; None if not measured.
        short: Scores of answers within the trained length; None if not measured.
        prose: Scores of documents within the trained length; None if not measured.
        status: "" if the variant may be chosen, else why it is out.
        is_servable: Whether it runs in all engines that the request names.
    """

    variant: Variant
    engines: tuple[str, ...] = ()
    long: Scores | None = None
    short: Scores | None = None
    prose: Scores | None = None
    status: str = ""
    is_servable: bool = True


def usable_length_of(
    row: VariantScores, plain: VariantScores, lengths: Mapping[str, int]
) -> UsableLength | None:
    """Return up to which length a variant keeps the plain model's short-context answers.

    Args:
        row: The variant's scores.
        plain: The plain model's.
        lengths: Tokens of the samples `short` and `long`.

    Returns:
        The length with its interval; None if the plain model has no answers to keep.
    """
    reference = plain.short and plain.short.accuracy_interval(exact=True)
    if plain.short is None or not reference or not reference.low > 0:
        return None
    parts = {lengths[kind]: getattr(row, kind) for kind in ("short", "long") if kind in lengths}
    scores: dict[int, Scores] = {n: part for n, part in parts.items() if part is not None}
    reference_texts = len(set(plain.short.groups))

    def kept(length: int, texts: int = 0) -> Interval | None:
        of = scores[length]
        share = of.accuracy_interval(exact=True)
        if share is None:
            return None
        if of == plain.short:  # to the last bit, as of what follows the length
            return replace(reference, estimate=1.0, low=1.0, high=1.0)
        times = (texts / len(set(of.groups)), texts / reference_texts)
        return retention(
            *(grown(x, max(1.0, t)) for x, t in zip((share, reference), times, strict=True))
        )

    measured = {length: kept(length) for length in scores}
    known = {length: interval for length, interval in measured.items() if interval is not None}
    if not known:
        return None
    return name_texts_needed(usable_length(known, USABLE_SHARE), USABLE_SHARE, kept)


def to_measured_variant(row: VariantScores, plain_engines: Sequence[str]) -> MeasuredVariant:
    """Return a variant for the decision rule.

    Args:
        row: The variant's scores, at the target length and within the trained length.
        plain_engines: Engines that run the plain model.
    """
    assert row.short is not None
    assert row.long is not None
    return MeasuredVariant(
        row.variant.name,
        row.long,
        row.short,
        row.prose,
        engines_lost=len(set(plain_engines) - set(row.engines)),
        option_count=row.variant.option_count,
        dynamic=row.variant.dynamic,
    )


def verdicts_on_plain(rows: Sequence[VariantScores], plain: Scores) -> dict[str, Verdict]:
    """Return what is shown of each measured method beside the plain model at the target length.

    The family is all rotations that were measured there: the chosen one was chosen among them.

    Args:
        rows: The scores of all variants.
        plain: The plain model's scores at the target length.
    """
    measured = {
        row.variant.name: row for row in rows if row.variant.method and row.long is not None
    }
    keys = {name: row.variant.long_rotation.key for name, row in measured.items()}
    tests = {
        keys[name]: score_difference(row.long, plain).test
        for name, row in measured.items()
        if row.long is not None
    }
    verdicts = family_verdicts(tests)
    return {name: verdicts[key] for name, key in keys.items()}


def held_out_table(rows: Mapping[str, VariantScores]) -> dict[str, Any]:
    """Return the held-out comparison for the search's result, see `SearchResult.held_out`."""
    table: dict[str, Any] = {}
    for name, row in rows.items():
        label = {PLAIN: "none"}.get(name, "found" if row.variant.from_search else name)
        if label in table or row.variant.dynamic or row.long is None:
            continue
        loss, accuracy = row.long.loss_interval(), row.long.accuracy_interval()
        table[label] = {
            "nll": loss.estimate,
            "interval": [loss.low, loss.high],
            "samples": len(row.long),
            **({} if accuracy is None else {"accuracy": accuracy.estimate}),
        }
    searched = next((row.long for row in rows.values() if row.variant.from_search), None)
    yarn = rows["yarn"].long
    if searched is not None and yarn is not None:
        difference = score_difference(searched, yarn).nll
        table["against yarn"] = {
            "nll": difference.estimate,
            "interval": [difference.low, difference.high],
        }
    return table
