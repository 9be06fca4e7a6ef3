"""Scores on samples, and the differences between two methods' scores on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.statistics import (
    Interval,
    PairedTest,
    accuracy,
    bootstrap_mean,
    mean_test,
    paired_difference,
)

# Nats a token below which a difference does not matter: about 1% of perplexity.
NEGLIGIBLE = 0.01
_LEVEL = 0.05  # below which a difference of answers is significant


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

    def accuracy_interval(self) -> Interval | None:
        """Return the share of right answers with its interval; None if there are no answers."""
        hits, groups = self.flat_hits()
        return accuracy(hits, groups) if hits else None


@dataclass(frozen=True)
class ScoreDifference:
    """The differences between two methods on the same samples, with 95% intervals.

    Attributes:
        nll: Nats by which the first is worse; without bounds below six texts.
        answers: Share of answers by which the first is better; None if there are no answers.
    """

    nll: Interval
    answers: PairedTest | None

    @property
    def hits(self) -> Interval | None:
        """Return the difference of the shares of right answers; None if there are no answers."""
        return None if self.answers is None else self.answers.difference

    @property
    def is_worse(self) -> bool:
        """Return whether the first is shown to be worse than the second; never below six texts."""
        answers = self.answers
        if answers is not None and answers.p_value < _LEVEL and answers.losses > answers.wins:
            return True
        return self.nll.low > 0 and self.nll.estimate > NEGLIGIBLE


def score_difference(first: Scores, second: Scores) -> ScoreDifference:
    """Return how the first differs from the second, on the samples that both scores cover."""
    count = min(len(first), len(second))
    first, second = first.first(count), second.first(count)
    differences = [a - b for a, b in zip(first.nll, second.nll, strict=True)]
    nll = mean_test(differences, first.groups).mean
    hits, groups = first.flat_hits()
    if not hits:
        return ScoreDifference(nll, None)
    return ScoreDifference(nll, paired_difference(hits, second.flat_hits()[0], groups))


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
