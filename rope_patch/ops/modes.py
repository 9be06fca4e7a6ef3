"""Ask which modes of torch and Triton are active, and copy to a device without a wait."""

from __future__ import annotations

import os

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module


def needs_plain_torch() -> bool:
    """Return whether `torch.jit.trace`, forward-mode AD or a transform of torch.func is active.

    They support neither our kernels nor operations with `out=`.
    """
    return (
        torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def has_global_hooks() -> bool:
    """Return whether a hook is registered on the calls of all modules."""
    # torch 2.6 has no function for this question; hooks of every kind are in one of these.
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def require_first_order(name: str, instead: str) -> None:
    """Raise in a backward pass whose gradients are to be differentiated (`create_graph=True`).

    `once_differentiable` of torch raises only where the incoming gradient has one itself, and drops
    the second derivative of a loss that is linear in the output.

    Args:
        name: What has first derivatives alone.
        instead: What to do.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has first derivatives alone, and create_graph=True asks for a second one: "
            f"{instead}"
        )


def version_counter(x: object) -> int:
    """Return how often a tensor was changed in place; 0 for what does not count it.

    Inference tensors do not, nor do numbers, which cannot change.
    """
    return x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0


def is_exporting() -> bool:
    """Return whether torch.export traces what runs now."""
    ask = getattr(torch.compiler, "is_exporting", None)  # torch 2.6 has none
    return ask is not None and ask()


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def copy_to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on a device, where it is ready for what follows on the current stream.

    A GPU copies from pinned memory, which PyTorch keeps until the copy is done. From other memory,
    the CPU would wait for all that the GPU has yet to do.
    """
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
