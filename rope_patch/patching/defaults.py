"""torch's default state, for probes that must not depend on the caller's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Run with torch's own defaults: float32, on the CPU, without gradients, autocast or inference.

    Probes compare numbers that modules compute, and must get the same result under
    `torch.set_default_dtype`, `torch.set_default_device` and any mode of the caller's.
    """
    dtype = torch.get_default_dtype()
    device: AbstractContextManager[object] = nullcontext()
    if torch.empty(0).device.type != "cpu":  # a device's context slows each function of torch
        device = torch.device("cpu")
    with (
        device,
        torch.inference_mode(False),  # enables gradients, so no_grad follows
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        if dtype == torch.float32:
            yield
            return
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
