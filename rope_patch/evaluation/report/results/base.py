"""RunResults: one run's results, its methods and their names."""

from __future__ import annotations

from functools import cached_property

from rope_patch.evaluation.report.format import one_line
from rope_patch.evaluation.report.table import COLOURS, PLAIN
from rope_patch.evaluation.results_schema import RunMetadata, RunRecord


class RunResults:
    """One run's results.

    Attributes:
        results: The run's results.
        run: Where and how it ran.
        labels: The methods' labels in order.
        plain: The label of the plain model; None if it did not run.
        patched: The other labels.
        trained_length: The trained length in tokens.
    """

    def __init__(self, results: RunRecord) -> None:
        self.results = results
        self.run: RunMetadata = results["run"]
        self.trained_length = int(self.run["trained_length"])
        methods = results["methods"]
        self.labels: list[str] = [m["label"] for m in methods]
        plain = [m["label"] for m in methods if m.get("method") is None]
        self.plain: str | None = plain[0] if plain else None
        self.patched = [label for label in self.labels if label != self.plain]

    @cached_property
    def names(self) -> dict[str, str]:
        """Return how each label reads in a sentence."""
        return {
            label: "plain model" if label == self.plain else one_line(label)
            for label in self.labels
        }

    @cached_property
    def colour_names(self) -> dict[str, str]:
        """Return the colour's name of each label: `plain` without a method, else m0, m1, ..."""
        colours = {label: f"m{i % COLOURS}" for i, label in enumerate(self.patched)}
        return {label: colours.get(label, PLAIN) for label in self.labels}
