"""Verification of a running engine: does it rotate as asked?"""

from rope_patch.utils.lazy_exports import export_lazily
from rope_patch.verifying.pipeline import verify
from rope_patch.verifying.verification import Verification

__all__ = ["Verification", "verify"]

export_lazily(
    __name__,
    {
        "clients": "CannotReach CannotVerify HttpError JsonClient",
        "engine_detection": "open_engine",
        "probe_prompts": "ProbePrompt",
        "reference": "Reference",
    },
)
