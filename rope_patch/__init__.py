"""rope_patch: one line takes a pretrained RoPE decoder to a longer context."""

from rope_patch.diagnosing import Diagnosis, diagnose
from rope_patch.loading import load
from rope_patch.methods import frequencies, methods
from rope_patch.patching import Patch, current, patch, unpatch
from rope_patch.saving import save

__all__ = [
    "Diagnosis",
    "Patch",
    "current",
    "diagnose",
    "frequencies",
    "load",
    "methods",
    "patch",
    "save",
    "unpatch",
]
