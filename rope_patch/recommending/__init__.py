"""Recommend a method for one checkpoint by measuring all of them on it."""

from rope_patch.recommending.pipeline import recommend

__all__ = ["recommend"]
