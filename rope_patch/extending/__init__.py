"""Extend a checkpoint: from a model to a longer one with the proof beside it, in one call."""

from rope_patch.extending.entry_point import extend
from rope_patch.extending.result import Extended

__all__ = ["Extended", "extend"]
