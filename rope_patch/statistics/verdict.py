"""Decide once what a paired comparison of losses shows; sentences, tables and choices read it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from rope_patch.statistics.clustered_mean import MeanTest
from rope_patch.statistics.paired_tests import holm, least_texts
from rope_patch.statistics.power import texts_to_decide

K = TypeVar("K", bound=Hashable)
SIGNIFICANCE_LEVEL = 0.05  # corrected p-values below it show a difference


class Outcome(Enum):
    """What a comparison shows of a method."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    TOO_FEW_TEXTS = "too few texts to say"
    NOT_TOLD_APART = "not told apart"


@dataclass(frozen=True)
class Verdict:
    """A method's losses beside those of another one on the same samples, and what that shows.

    Attributes:
        test: The method's loss less the other's, below 0 where it is better, over texts.
        p_value: Of no difference, corrected for the family of comparisons and for looks.
        level: What the family leaves of `SIGNIFICANCE_LEVEL` for its first test (Holm 1979).
    """

    test: MeanTest
    p_value: float
    level: float = SIGNIFICANCE_LEVEL

    @property
    def outcome(self) -> Outcome:
        """Return what is shown; `EQUAL` if no loss differs, on enough texts for an interval."""
        mean = self.test.mean
        if self.is_shown:
            return Outcome.BETTER if mean.estimate < 0 else Outcome.WORSE
        if mean.low == mean.high == 0:
            return Outcome.EQUAL
        if mean.effective_n < self.least_texts:
            return Outcome.TOO_FEW_TEXTS
        return Outcome.NOT_TOLD_APART

    @property
    def is_shown(self) -> bool:
        """Return whether a difference is shown."""
        return self.p_value < SIGNIFICANCE_LEVEL

    @property
    def least_texts(self) -> int:
        """Return the fewest texts with which the family can show anything."""
        return least_texts(self.level)

    @property
    def texts_needed(self) -> int | None:
        """Return how many texts would decide, were the difference as measured; None if unknown.

        None as well if there are as many already.
        """
        needed = texts_to_decide(self.test, self.level)
        return needed if needed and needed > self.test.mean.effective_n else None


def family_verdicts(tests: Mapping[K, MeanTest], look_factor: float = 1.0) -> dict[K, Verdict]:
    """Return the verdicts on a family of comparisons, corrected by Holm and for looks.

    Args:
        tests: All comparisons of the family.
        look_factor: What `statistics.look_factor` returns for the looks at growing data.
    """
    adjusted = holm([test.p_value for test in tests.values()])
    level = SIGNIFICANCE_LEVEL / max(len(tests), 1) / look_factor
    return {
        key: Verdict(test, min(1.0, look_factor * p), level)
        for (key, test), p in zip(tests.items(), adjusted, strict=True)
    }
