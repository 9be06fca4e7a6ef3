"""Verification of a running engine: does it rotate as asked?"""

from rope_patch.utils.front import front
from rope_patch.verifying.pipeline import verify
from rope_patch.verifying.verification import Verification

__all__ = ["Verification", "verify"]

front(
    __name__,
    {
        "clients": "CannotReach CannotVerify HttpError JsonClient",
        "engine_detection": "open_engine",
        "probe_prompts": "ProbePrompt",
        "reference": "Reference",
    },
)
