"""Run probes under torch's own defaults, and bind replaced forwards to a model's replicas."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from rope_patch.patching.architecture.frequency_buffers import forward_per_row
from rope_patch.patching.undo_log import UndoLog


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


class ReplicaMaker:
    """A module's `_replicate_for_data_parallel` that binds the replaced forward to the replica.

    `nn.DataParallel` gives each replica its own weights and frequencies, but copies all other
    attributes as they are, including a replaced forward that is bound to the original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        module: Any = self.module
        replica = type(module)._replicate_for_data_parallel(module)
        # A weak reference: a forward that holds its replica would keep the weights after the step.
        replica.__dict__["forward"] = forward_for_replica(module.forward, weakref.proxy(replica))
        return replica


def forward_for_replica(forward: Any, replica: Any) -> Any:
    """Return a module's forward bound to its replica; return a foreign forward unchanged."""
    if isinstance(forward, MethodType) and isinstance(forward.__self__, nn.Module):
        return partial(forward.__func__, replica)
    if isinstance(forward, partial) and forward.func is forward_per_row:
        names, _, own = forward.args
        return partial(forward_per_row, names, replica, forward_for_replica(own, replica))
    make = getattr(forward, "for_replica", None)
    return forward if make is None else make(replica)


def support_replicas(undo_log: UndoLog) -> None:
    """Bind the forward of replicas, for all modules whose forward was replaced."""
    for module in undo_log.owners("forward"):
        undo_log.set(module, "_replicate_for_data_parallel", ReplicaMaker(module))
