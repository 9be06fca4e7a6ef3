"""Modes of torch in which neither kernels nor operations with `out=` can take part."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def needs_plain_torch() -> bool:
    """Whether `torch.jit.trace` records, or forward-mode AD derives, what runs now."""
    return torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
