"""What a model's rotation can reach, whether transformers does what the config says, what to do."""

from rope_patch.diagnosing.advice import Advice, Reason
from rope_patch.diagnosing.diagnosis import Diagnosis
from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.pairs import Pair, PairTable
from rope_patch.diagnosing.pipeline import diagnose

__all__ = ["Advice", "Diagnosis", "Finding", "Pair", "PairTable", "Reason", "diagnose"]
