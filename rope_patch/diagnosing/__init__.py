"""Diagnosis of a model's rotation: config against reality, reachable length, recommendation."""

from rope_patch.diagnosing.advice import Advice, Pair, PairTable, Reason
from rope_patch.diagnosing.diagnosis import Diagnosis
from rope_patch.diagnosing.facts import Finding
from rope_patch.diagnosing.pipeline import diagnose
from rope_patch.utils.lazy_exports import export_lazily

__all__ = ["Advice", "Diagnosis", "Finding", "Pair", "PairTable", "Reason", "diagnose"]

export_lazily(
    __name__,
    {
        "advice": "base_bound critical_base failing_distance",
    },
)
