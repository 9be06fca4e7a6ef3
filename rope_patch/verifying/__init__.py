"""Verification of a running engine: does it rotate as asked?"""

from rope_patch.verifying.pipeline import verify
from rope_patch.verifying.verification import Verification

__all__ = ["Verification", "verify"]
