"""RunStatistics: every number of the report with its interval, from one run's raw samples.

Results hold samples; nothing here is stored, so a better statistic needs no new run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from rope_patch import statistics
from rope_patch.evaluation.report.results.likelihood import LikelihoodStatistics
from rope_patch.evaluation.report.results.perplexity import PerplexityStatistics, bounded
from rope_patch.evaluation.report.results.retrieval import cached_method
from rope_patch.evaluation.report.table import one_line
from rope_patch.evaluation.results_schema import HarnessRecord, ShortRecord
from rope_patch.statistics import Interval, PairedTest


class RunStatistics(LikelihoodStatistics, PerplexityStatistics):
    """One run's numbers, each computed once."""

    def short(self, task: ShortRecord, label: str) -> tuple[Interval, PairedTest | None] | None:
        """Return accuracy at an ordinary task, and its difference from the plain model's."""
        return self._paired(task["samples"], label)

    def harness(
        self, task: HarnessRecord, metric: str, label: str
    ) -> tuple[Interval, PairedTest | None] | None:
        """Return a mean of lm-eval's, and its difference from the plain model's.

        None for a metric without scores of single samples.
        """
        metrics = {name: by.get(metric) for name, by in task["metrics"].items()}
        texts = [m["texts"] for m in metrics.values() if m and "texts" in m]
        scores = {name: m.get("scores") or [] for name, m in metrics.items() if m}
        return self._paired(scores, label, texts[0] if texts else None)

    def harness_perplexity(
        self, task: HarnessRecord, metric: str, label: str
    ) -> tuple[Interval, Interval | None] | None:
        """Return a perplexity of lm-eval's, and its ratio to the plain model's.

        None for a metric without losses of single documents.
        """
        metrics = {name: by.get(metric) for name, by in task["metrics"].items()}
        losses = {name: m["losses"] for name, m in metrics.items() if m and m.get("losses")}
        if label not in losses:
            return None
        means, weights = _means_and_weights(losses[label])
        if not means:
            return None
        # Each document is one block.
        interval = bounded(statistics.perplexity_interval(means, weights))
        interval = replace(interval, unit="documents")
        base = losses.get(self.plain or "")
        if label == self.plain or base is None:
            return interval, None
        base_means, base_weights = _means_and_weights(base)
        if base_weights != weights:
            return interval, None
        ratio = statistics.perplexity_ratio(means, base_means, weights)
        return interval, replace(ratio, unit="documents")

    def _paired(
        self,
        by_label: Mapping[str, Sequence[float | None]],
        label: str,
        texts: Sequence[int] | None = None,
    ) -> tuple[Interval, PairedTest | None] | None:
        scores = _numbers(by_label.get(label))
        if all(score is None for score in scores):
            return None
        base = _numbers(by_label.get(self.plain)) if self.plain else []
        compared = label != self.plain and _have_common_scores(scores, base)
        paired = statistics.mcnemar(scores, base, texts) if compared else None
        return statistics.accuracy(scores, texts), paired

    @cached_method
    def short_overall(self, label: str) -> PairedTest | None:
        """Compare all ordinary tasks together with the plain model."""
        mine: list[float | None] = []
        base: list[float | None] = []
        for task in self.results.get("short") or []:
            scores = _numbers(task["samples"].get(label))
            plain = _numbers(task["samples"].get(self.plain)) if self.plain else []
            if _have_common_scores(scores, plain):
                mine += scores
                base += plain
        return statistics.mcnemar(mine, base) if mine and label != self.plain else None

    @cached_property
    def short_p_values(self) -> dict[str, float]:
        """Return each method's p of all ordinary tasks together, after Holm over the methods."""
        tests = {label: test for label in self.labels if (test := self.short_overall(label))}
        adjusted = statistics.holm([test.p_value for test in tests.values()])
        return dict(zip(tests, adjusted, strict=True))


def task_name(task: str) -> str:
    """Return a task's name to read: without the package's prefix."""
    return one_line(re.sub(r"^rp_", "", str(task)))


def _numbers(scores: Sequence[float | None] | None) -> list[float | None]:
    return [None if score is None else float(score) for score in scores or []]


def _means_and_weights(
    losses: Sequence[Sequence[float]],
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the mean loss and the weight of each document, as a block of its own."""
    weighed = [(float(nats), float(weight)) for nats, weight in losses if weight]
    return [[nats / weight] for nats, weight in weighed], [[weight] for _, weight in weighed]


def _have_common_scores(mine: list[float | None], base: list[float | None]) -> bool:
    """Return whether two methods have scores of the same samples."""
    both = zip(mine, base, strict=False)
    return len(mine) == len(base) and any(None not in pair for pair in both)
