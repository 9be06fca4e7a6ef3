"""rope_patch: one line takes a pretrained RoPE decoder to a longer context."""

from rope_patch.adapting import load_adapter
from rope_patch.diagnosing import Diagnosis, diagnose
from rope_patch.exporting import Export, export
from rope_patch.loading import load
from rope_patch.methods import frequencies, methods
from rope_patch.patching import Patch, current, patch, unpatch
from rope_patch.recommending import recommend
from rope_patch.registering import register, unregister
from rope_patch.saving import save
from rope_patch.searching import Found, search

__all__ = [
    "Diagnosis",
    "Export",
    "Found",
    "Patch",
    "current",
    "diagnose",
    "export",
    "frequencies",
    "load",
    "load_adapter",
    "methods",
    "patch",
    "recommend",
    "register",
    "save",
    "search",
    "unpatch",
    "unregister",
]
