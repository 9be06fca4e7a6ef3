"""Modes of torch that support neither our kernels nor operations with `out=`."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def needs_plain_torch() -> bool:
    """Return whether `torch.jit.trace`, forward-mode AD or a transform of torch.func is active."""
    return (
        torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )
