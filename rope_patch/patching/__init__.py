"""Changing a live model's rotation, and back. The only folder that touches a model."""

from rope_patch.patching.handle import Patch, check, current, patch, unpatch

__all__ = ["Patch", "check", "current", "patch", "unpatch"]
