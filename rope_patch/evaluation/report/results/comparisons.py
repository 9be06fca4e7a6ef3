"""ComparisonStatistics: tests between methods, one family: all methods at the longest length."""

from __future__ import annotations

from typing import TypeVar

from rope_patch import statistics
from rope_patch.evaluation.report.results.retrieval import RetrievalStatistics
from rope_patch.statistics import PairedTest

K = TypeVar("K")


class ComparisonStatistics(RetrievalStatistics):
    """Tests between the methods of one run.

    A family of tests is all methods at one length, by one measure. Single tasks and shorter lengths
    are not tested, or some of so many cells would seem significant by chance.
    """

    def accuracy_comparisons(self) -> dict[str, tuple[PairedTest, float]]:
        """Return each method's difference from the plain model, and its p after Holm.

        Of the mean over tasks at the longest length. The family is all methods there.
        """
        if self.plain is None or not self.lengths:
            return {}
        tests = {
            label: test
            for label in self.patched
            if (test := self.difference(label, self.plain, None, (self.lengths[-1],))) is not None
        }
        adjusted = self.adjust({label: test.p_value for label, test in tests.items()})
        return {label: (test, adjusted[label]) for label, test in tests.items()}

    def best_by_accuracy(self) -> tuple[str, float] | None:
        """Return the best patched method at the longest length, and p that another is as good.

        That is the largest p against the other patched methods after Holm; they are the family.
        None with fewer than two.
        """
        length = (self.lengths or [0])[-1]
        scores = {
            label: accuracy.estimate
            for label in self.patched
            if (accuracy := self.accuracy(label, None, (length,))) is not None
        }
        if len(scores) < 2:
            return None
        best = max(scores, key=lambda label: scores[label])
        tests = {
            label: test.p_value
            for label in scores
            if label != best and (test := self.difference(best, label, None, (length,)))
        }
        return best, max(self.adjust(tests).values(), default=1.0)

    @property
    def looks(self) -> int:
        """Return how many times the run looked at its samples of the longest length."""
        return len(self.run.get("looks") or [])

    def look_factor(self, length: int | None = None) -> int:
        """Return what p-values at a length are multiplied by, for looks at a run that grew.

        Args:
            length: Tokens; the longest length unless given, where alone a run grows.
        """
        if length is not None and length not in self.lengths[-1:]:
            return 1
        return statistics.look_factor(self.looks)

    def adjust(self, p_values: dict[K, float], length: int | None = None) -> dict[K, float]:
        """Return the p-values of one family, adjusted by Holm and for looks.

        Args:
            p_values: Of all methods at one length.
            length: Tokens; the longest length unless given.
        """
        adjusted = statistics.holm(list(p_values.values()))
        factor = self.look_factor(length)
        return {key: min(1.0, factor * p) for key, p in zip(p_values, adjusted, strict=True)}
