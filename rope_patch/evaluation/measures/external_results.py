"""ExternalResults: the results of lm-eval's tasks and users' under every method, as records."""

from __future__ import annotations

from rope_patch import tasks
from rope_patch.evaluation.harness_schema import HarnessRecord, MetricRecord
from rope_patch.evaluation.measures.external_tasks import ExternalResult, ExternalTask
from rope_patch.evaluation.results_schema import RetrievalRecord, SampleRecord


class ExternalResults:
    """The results of external tasks.

    Samples that are made at a length become those of a retrieval task, with accuracy by length,
    retention and paired tests; all other metrics become those of a harness task.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, dict[str, MetricRecord]]] = {}
        self._samples: dict[str, dict[str, list[SampleRecord]]] = {}

    def add(self, external: ExternalTask, label: str, result: ExternalResult) -> None:
        """Add what a task gave under a method.

        Args:
            external: The task, at one length if it is made at lengths.
            label: The method's name in the results.
            result: From `external_tasks.evaluate`.
        """
        if result.metrics:
            self._metrics.setdefault(external.label, {})[label] = result.metrics
        if result.samples:
            name = external.name
            if f"rp_{name}" in tasks.names():  # reports show ours without the prefix
                name = f"lm-eval {name}"
            self._samples.setdefault(name, {}).setdefault(label, []).extend(result.samples)

    def harness(self) -> list[HarnessRecord]:
        """Return the part `harness` of the results."""
        return [{"task": name, "metrics": by} for name, by in self._metrics.items()]

    def retrieval(self) -> list[RetrievalRecord]:
        """Return the tasks that are made at lengths, for the part `retrieval` of the results."""
        records: list[RetrievalRecord] = []
        for name, by_label in self._samples.items():
            rows = [row for samples in by_label.values() for row in samples]
            records.append(
                {
                    "task": name,
                    "lengths": sorted({row["length"] for row in rows}),
                    "depths": sorted({d for row in rows if (d := row["depth"]) is not None}),
                    "samples": by_label,
                }
            )
        return records
