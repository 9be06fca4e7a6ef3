"""Which method to use on one checkpoint, by measuring those that there are."""

from rope_patch.recommending.pipeline import recommend

__all__ = ["recommend"]
