"""The number format that a recipe computes in."""

from __future__ import annotations

import os
from typing import Any


def mixed_precision(training: Any) -> str:
    """Return accelerate's `mixed_precision`: the number format of matrix products.

    As in the Trainer, accelerate's config decides if the recipe does not.
    """
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return "bf16" if training.bf16 else launcher_precision
