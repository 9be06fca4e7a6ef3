"""Replicas of `nn.DataParallel`, each with its own weights and frequencies.

torch copies a module's attributes to its replicas as they are, including a replaced forward that is
bound to the original.
"""

from __future__ import annotations

import weakref
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from rope_patch.patching.frequency_buffers import forward_per_row
from rope_patch.patching.undo_log import UndoLog


class ReplicaMaker:
    """A module's `_replicate_for_data_parallel` that binds the replaced forward to the replica."""

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
