"""LikelihoodStatistics: how likely the right answers are, compared between methods by text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from rope_patch import statistics
from rope_patch.evaluation.report.results.retrieval import (
    ComparisonStatistics,
    ScoredSample,
    cached_method,
    scored_samples,
)
from rope_patch.statistics import SIGNIFICANCE_LEVEL, ClusteredMean, MeanTest, Verdict
from rope_patch.tasks import question_of, text_of


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

    @cached_method
    def answer_loss(self, label: str, length: int) -> ClusteredMean | None:
        """Return the mean loss of the right answers at a length; None where there is none."""
        losses = list(self._losses_at(label, length).values())
        return _mean(losses, self.look_factor(length))

    @cached_method
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

    def verdicts(self, other: str | None, length: int) -> dict[str, Verdict]:
        """Return what is shown of each patched method beside another one; {} if that is None.

        The family is all these comparisons at this length.
        """
        tests = {
            label: test
            for label in self.patched
            if other not in (None, label)
            and (test := self.loss_difference(label, str(other), length)) is not None
        }
        return statistics.family_verdicts(tests, self.look_factor(length))

    def verdicts_on_plain(self, length: int) -> dict[str, Verdict]:
        """Return what is shown of each patched method beside the plain model."""
        return self.verdicts(self.plain, length)

    def best_by_likelihood(self, length: int) -> str | None:
        """Return the patched method under which the right answers are the likeliest."""
        means = {
            label: loss.mean.estimate
            for label in self.patched
            if (loss := self.answer_loss(label, length)) is not None
        }
        return min(means, key=lambda label: means[label]) if means else None

    @property
    def has_enough_texts(self) -> bool:
        """Return whether the verdict rests on as many texts as can decide it."""
        length = self.verdict_length
        verdicts = self.verdicts_on_plain(length) if length else {}
        return any(v.test.mean.effective_n >= v.least_texts for v in verdicts.values())

    @property
    def is_decided(self) -> bool:
        """Return whether more texts can add nothing to the verdict on the best method.

        It is shown to differ from the plain model, or its answers are the plain model's to the bit,
        or they were not measured.
        """
        length = self.verdict_length
        best = self.best_by_likelihood(length) if length else None
        verdict = self.verdicts_on_plain(length).get(best) if length and best else None
        if verdict is None:
            return True
        return verdict.is_shown or verdict.test.deviation == verdict.test.mean.estimate == 0

    def rivals_of_best(self, length: int) -> list[str]:
        """Return the methods that are not shown to be worse than the best one.

        The family is all other methods at this length.
        """
        verdicts = self.verdicts(self.best_by_likelihood(length), length)
        return [label for label, verdict in verdicts.items() if not verdict.is_shown]

    @cached_property
    def floor(self) -> ClusteredMean | None:
        """Return the plain model's loss on the same questions without their answers in the text.

        It was measured at the shortest length. None without controls.
        """
        losses = [
            loss
            for entry in self.control_records("no answer")
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
            (text_of(s["task"]), s["length"], s["text"]),
            (s["task"], s["length"]),
        )
        for s in samples
        if (nats := s.get("log_likelihood")) is not None and (tokens := s.get("target_tokens"))
    }


def _mean(losses: Sequence[AnswerLoss], look_factor: int = 1) -> ClusteredMean | None:
    """Return the mean of losses over texts; None without losses, or where one is infinite."""
    numbers = _finite_numbers(losses, look_factor)
    if numbers is None:
        return None
    loss = statistics.clustered_mean(*numbers)
    # Student's interval of few losses may reach below 0, where no loss is: it covers without that.
    low = max(loss.mean.low, min(0.0, loss.mean.estimate))
    is_known = math.isfinite(loss.mean.half_width)
    return replace(loss, mean=replace(loss.mean, low=low)) if is_known else loss


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
