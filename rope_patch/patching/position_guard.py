"""Processes that hold parts of the same sequences: each must say where its part stands.

Under context parallelism every process is given some of a sequence's tokens. A model that is given
no positions counts them from 0, in every process alike, and rotates all parts but the first wrongly
without a word.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.dynamic import sequence_lengths
from rope_patch.patching.undo_log import UndoLog

_POSITIONS = "position_ids"


class PositionIdsGuard:
    """Ahead of a forward: refuses a part of a sequence that nobody said the place of.

    Attributes:
        group: The processes that hold the other parts, where accelerate does not know of them.
    """

    def __init__(self, reader: nn.Module) -> None:
        self.group: Any = None
        self._at = parameter_names(reader).index(_POSITIONS)

    def __call__(self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get(_POSITIONS) is not None:
            return
        if len(args) > self._at and args[self._at] is not None:
            return
        if (self.group or sequence_lengths.context_parallel_group()) is not None:
            raise ValueError(
                "under context parallelism each process sees a part of the sequence: expected "
                "position_ids, which say where the tokens stand in the whole of it"
            )


def install_position_guards(
    model: nn.Module, rotaries: list[RotaryModule], undo_log: UndoLog
) -> list[PositionIdsGuard]:
    """Has the modules that are given tokens and positions for a rotation insist on the positions.

    The decoder, and what is between it and the outermost, as a multimodal model counts positions
    there. The outermost itself hands on what it gets, and with a hook around it torch.compile would
    make two graphs of one.

    Args:
        model: The model.
        rotaries: Its rotary modules.
        undo_log: Where the changes are recorded.
    """
    rotating = {id(rotary.module) for rotary in rotaries}
    readers = [
        module
        for module in model.modules()
        if {"input_ids", _POSITIONS} <= set(parameter_names(module))
        and any(id(inner) in rotating for inner in module.modules())
    ]
    found = []
    for reader in readers[1:] or readers:
        found.append(PositionIdsGuard(reader))
        undo_log.hook(reader, before=found[-1])
    return found


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of what a module's forward takes."""
    kind: Any = type(module)
    return _parameter_names(kind)


@functools.cache
def _parameter_names(kind: Any) -> list[str]:
    try:
        return list(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):  # a forward that says nothing of itself
        return []
