"""Modes of torch and Triton that change which code can run."""

from __future__ import annotations

import os

import torch
from torch.autograd import forward_ad


def needs_plain_torch() -> bool:
    """Return whether `torch.jit.trace`, forward-mode AD or a transform of torch.func is active.

    They support neither our kernels nor operations with `out=`.
    """
    return (
        torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
