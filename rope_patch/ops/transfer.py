"""Copies of small tensors to a device that the CPU does not wait for."""

from __future__ import annotations

import torch


def copy_to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on a device, where it is ready for what follows on the current stream.

    A GPU copies from pinned memory, which PyTorch keeps until the copy is done. From other memory,
    the CPU would wait for all that the GPU has yet to do.
    """
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
