"""Apply a rotation to a live model, and undo it. The only folder that touches a model."""

from rope_patch.patching.entry_points import check, patch, unpatch
from rope_patch.patching.handle import Patch, current
from rope_patch.patching.restoration import restore

__all__ = ["Patch", "check", "current", "patch", "restore", "unpatch"]
