"""Apply a rotation to a live model, and undo it. The only folder that touches a model."""

from rope_patch.patching.entry_points import (
    check,
    check_encoding,
    patch,
    patch_rotation,
    prove,
    unpatch,
)
from rope_patch.patching.handle import Patch, current
from rope_patch.patching.replacement.entry_point import encode
from rope_patch.patching.replacement.registry import list_encodings
from rope_patch.patching.restoration import restore

__all__ = [
    "Patch",
    "check",
    "check_encoding",
    "current",
    "encode",
    "list_encodings",
    "patch",
    "patch_rotation",
    "prove",
    "restore",
    "unpatch",
]
