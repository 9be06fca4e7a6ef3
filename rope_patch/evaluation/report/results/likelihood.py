"""LikelihoodStatistics: how likely the right answers are, compared between methods by text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from rope_patch import statistics
from rope_patch.evaluation.report.results.retrieval import (
    ComparisonStatistics,
    ScoredSample,
    scored_samples,
)
from rope_patch.statistics import ClusteredMean, MeanTest
from rope_patch.tasks import question_of

SIGNIFICANCE_LEVEL = 0.05


class AnswerLoss(NamedTuple):
    """The loss of one right answer.

    Attributes:
        nats: Nats per token.
        text: The text that the question is about.
        stratum: The task and the length.
    """

    nats: float
    text: tuple[str, int, int]
    stratum: tuple[str, int]


class LikelihoodStatistics(ComparisonStatistics):
    """Losses of the right answers, in nats per token of the answer.

    A few answers tell more by how likely they are than by how many are right: a loss moves where
    hits stay 0 or 1. Each task at each length counts the same, and samples of one text are one
    piece of evidence.
    """

    @cached_property
    def likelihood_tasks(self) -> list[str]:
        """Return one task for each question that was asked, of those with likelihoods."""
        by_question: dict[str, str] = {}
        for task in self.tasks:
            if any(self._losses(label, task) for label in self.labels):
                by_question.setdefault(question_of(task), task)
        return list(by_question.values())

    @cached_property
    def verdict_length(self) -> int | None:
        """Return the longest length beyond the trained one at which answers have likelihoods."""
        measured = [
            length
            for length in self.lengths_beyond_training
            if any(self.answer_loss(label, length) for label in self.labels)
        ]
        return measured[-1] if measured else None

    def answer_loss(self, label: str, length: int) -> ClusteredMean | None:
        """Return the mean loss of the right answers at a length; None where there is none."""
        losses = list(self._losses_at(label, length).values())
        return _mean(losses, self.look_factor(length))

    def loss_difference(self, label: str, other: str, length: int) -> MeanTest | None:
        """Return a method's loss less another's on the same samples, below 0 where it is better."""
        mine, theirs = self._losses_at(label, length), self._losses_at(other, length)
        differences = [
            loss._replace(nats=loss.nats - theirs[key].nats)
            for key, loss in mine.items()
            if key in theirs
        ]
        numbers = _finite_numbers(differences, self.look_factor(length))
        return None if numbers is None else statistics.mean_test(*numbers)

    def comparisons_with_plain(self, length: int) -> dict[str, tuple[MeanTest, float]]:
        """Return each method's difference from the plain model, and its p after Holm.

        The family is all methods at this length.
        """
        if self.plain is None:
            return {}
        tests = {
            label: test
            for label in self.patched
            if (test := self.loss_difference(label, self.plain, length)) is not None
        }
        adjusted = self.adjust({label: test.p_value for label, test in tests.items()}, length)
        return {label: (test, adjusted[label]) for label, test in tests.items()}

    def best_by_likelihood(self, length: int) -> str | None:
        """Return the patched method under which the right answers are the likeliest."""
        means = {
            label: loss.mean.estimate
            for label in self.patched
            if (loss := self.answer_loss(label, length)) is not None
        }
        return min(means, key=lambda label: means[label]) if means else None

    def deciding_level(self, length: int) -> float:
        """Return the level of the first of a length's tests: Holm's and this look's part of .05."""
        methods = len(self.comparisons_with_plain(length))
        return SIGNIFICANCE_LEVEL / max(methods, 1) / self.look_factor(length)

    def least_texts(self, length: int) -> int:
        """Return the fewest texts with which some method can be shown to differ at a length."""
        return statistics.least_texts(self.deciding_level(length))

    @property
    def has_enough_texts(self) -> bool:
        """Return whether the verdict rests on as many texts as can decide it."""
        length = self.verdict_length
        comparisons = self.comparisons_with_plain(length) if length else {}
        texts = max((test.mean.effective_n for test, _ in comparisons.values()), default=0)
        return length is not None and texts >= self.least_texts(length)

    @property
    def is_decided(self) -> bool:
        """Return whether more texts can add nothing to the verdict on the best method.

        It is shown to differ from the plain model, or its answers are the plain model's to the bit,
        or they were not measured.
        """
        length = self.verdict_length
        best = self.best_by_likelihood(length) if length else None
        comparison = self.comparisons_with_plain(length).get(best) if length and best else None
        if comparison is None:
            return True
        test, p_value = comparison
        return p_value < SIGNIFICANCE_LEVEL or test.deviation == test.mean.estimate == 0

    def rivals_of_best(self, length: int) -> list[str]:
        """Return the methods that are not shown to be worse than the best one.

        The family is all other methods at this length.
        """
        best = self.best_by_likelihood(length)
        if best is None:
            return []
        tests = {
            label: test
            for label in self.patched
            if label != best and (test := self.loss_difference(label, best, length)) is not None
        }
        adjusted = self.adjust({label: test.p_value for label, test in tests.items()}, length)
        return [label for label in tests if adjusted[label] >= SIGNIFICANCE_LEVEL]

    @cached_property
    def floor(self) -> ClusteredMean | None:
        """Return the plain model's loss on the same questions without their answers in the text.

        It was measured at the shortest length. None without controls.
        """
        losses = [
            loss
            for entry in self.results.get("control") or []
            if entry["task"] in self.likelihood_tasks
            for rows in (entry.get("samples") or {}).values()
            for loss in _answer_losses(scored_samples(entry["task"], rows)).values()
        ]
        return _mean(losses)

    def reads_answers(self, label: str, length: int) -> bool:
        """Return whether right answers are shown to be likelier than where the text lacks them.

        By the test of two means against the floor, whose texts are others; the family is all
        methods at this length. False where there is no floor.
        """
        losses = {
            other: loss
            for other in self.patched
            if (loss := self.answer_loss(other, length)) is not None
        }
        if self.floor is None or label not in losses:
            return False
        p_values = {
            other: statistics.two_means_p(loss, self.floor) for other, loss in losses.items()
        }
        is_below = losses[label].mean.estimate < self.floor.mean.estimate
        return is_below and self.adjust(p_values, length)[label] < SIGNIFICANCE_LEVEL

    def _losses_at(self, label: str, length: int) -> dict[tuple[str, str], AnswerLoss]:
        losses: dict[tuple[str, str], AnswerLoss] = {}
        for task in self.likelihood_tasks:
            losses |= self._losses(label, task, (length,))
        return losses

    def _losses(
        self, label: str, task: str, lengths: tuple[int, ...] | None = None
    ) -> dict[tuple[str, str], AnswerLoss]:
        return _answer_losses(self.samples(label, task, lengths))


def _answer_losses(samples: Sequence[ScoredSample]) -> dict[tuple[str, str], AnswerLoss]:
    """Return the loss of each sample that has one, by task and sample."""
    return {
        (s["task"], s["id"]): AnswerLoss(
            -float(nats) / tokens,
            (question_of(s["task"]), s["length"], s["text"]),
            (s["task"], s["length"]),
        )
        for s in samples
        if (nats := s.get("log_likelihood")) is not None and (tokens := s.get("target_tokens"))
    }


def _mean(losses: Sequence[AnswerLoss], look_factor: int = 1) -> ClusteredMean | None:
    """Return the mean of losses over texts; None without losses, or where one is infinite."""
    numbers = _finite_numbers(losses, look_factor)
    return None if numbers is None else statistics.clustered_mean(*numbers)


def _finite_numbers(
    losses: Sequence[AnswerLoss], look_factor: int
) -> tuple[list[float], list[tuple[str, int, int]], list[tuple[str, int]], float] | None:
    """Return nats, texts, strata and confidence; None without losses, or where one is infinite."""
    if not losses or not all(math.isfinite(loss.nats) for loss in losses):
        return None
    nats, texts = [loss.nats for loss in losses], [loss.text for loss in losses]
    strata = [loss.stratum for loss in losses]
    # Where looks share the error rate, the interval holds at all of them (a repeated confidence
    # interval, Jennison & Turnbull 1989).
    return nats, texts, strata, 1 - SIGNIFICANCE_LEVEL / look_factor
