"""Guard that insists on position_ids under context parallelism.

Under context parallelism every process sees a part of a sequence. Without position_ids a model
counts positions from 0 in every process, and silently rotates all parts but the first wrongly.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.dynamic import sequence_lengths
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import TOKENS, ForwardCall, parameter_names
from rope_patch.utils.errors import Refused


class PositionIdsGuard:
    """Pre-hook that refuses a part of a sequence without position_ids.

    Attributes:
        group: The processes that hold the other parts, if accelerate does not know them.
    """

    def __init__(self) -> None:
        self.group: Any = None

    def __call__(self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if ForwardCall(reader, args, kwargs).position_ids is not None:
            return
        if (self.group or sequence_lengths.context_parallel_group()) is not None:
            raise Refused(
                "under context parallelism each process sees a part of the sequence: expected "
                "position_ids, which say where the tokens stand in the whole of it"
            )


def install_position_guards(
    model: nn.Module, rotaries: list[RotaryModule], undo_log: UndoLog
) -> list[PositionIdsGuard]:
    """Install guards on the modules between the outermost one and the rotary modules.

    These are the decoder, and the modules between it and the outermost one, where a multimodal
    model counts positions. The outermost one passes its arguments on; a hook around it would make
    torch.compile split the graph.

    Args:
        model: The model.
        rotaries: Its rotary modules.
        undo_log: Log of the changes.
    """
    rotary_ids = {id(rotary.module) for rotary in rotaries}
    readers = [
        module
        for module in model.modules()
        if TOKENS in parameter_names(module)
        and any(id(inner) in rotary_ids for inner in module.modules())
    ]
    guards = []
    for reader in readers[1:] or readers:
        guards.append(PositionIdsGuard())
        undo_log.hook(reader, before=guards[-1])
    return guards
