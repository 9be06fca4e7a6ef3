"""Replicas of `nn.DataParallel`: each must rotate with weights and frequencies of its own.

torch copies a module's attributes to its replicas as they are, and with them a forward that was put
there for the original.
"""

from __future__ import annotations

import weakref
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from rope_patch.patching.architecture.probe import forward_per_row
from rope_patch.patching.undo_log import UndoLog


class ReplicaMaker:
    """A module's `_replicate_for_data_parallel`, which binds its forward to the replica."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        module: Any = self.module
        replica = type(module)._replicate_for_data_parallel(module)
        # Held strongly by its own forward, a replica and its weights would outlive the step.
        replica.__dict__["forward"] = forward_for_replica(module.forward, weakref.proxy(replica))
        return replica


def forward_for_replica(forward: Any, replica: Any) -> Any:
    """Return a module's forward for its replica; somebody else's forward is returned as it is."""
    if isinstance(forward, MethodType) and isinstance(forward.__self__, nn.Module):
        return partial(forward.__func__, replica)
    if isinstance(forward, partial) and forward.func is forward_per_row:
        names, _, own = forward.args
        return partial(forward_per_row, names, replica, forward_for_replica(own, replica))
    make = getattr(forward, "forward_for_replica", None)
    return forward if make is None else make(replica)


def support_replicas(undo_log: UndoLog) -> None:
    """Make replicas of all modules whose forward has been set right."""
    for module in undo_log.owners("forward"):
        undo_log.set(module, "_replicate_for_data_parallel", ReplicaMaker(module))
