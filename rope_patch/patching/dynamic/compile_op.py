"""Custom op that updates frequencies at run time, so torch.compile does not specialise on lengths.

Whether a step changes frequencies depends on lengths. Reading them in the graph would break it or
compile them in; the op reads them when the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from rope_patch.utils.errors import Refused

_instances: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register_hooks(hooks: Any) -> int:
    """Return a handle by which the op finds `LengthHooks`; holds no reference to them."""
    handle = next(_handles)
    _instances[handle] = hooks
    return handle


# CUDA graphs would replay the outcome of the recorded run.
_tags: Any = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]
UNCAPTURED: dict[str, Any] = {"tags": _tags} if _tags else {}


@torch.library.custom_op(
    "rope_patch::follow",
    mutates_args=("keys", "bounds", "sets"),
    # torch 2.6 cannot infer a schema from list[torch.Tensor].
    schema="(Tensor(a!)[] keys, Tensor[] slots, SymInt[] kinds, Tensor positions, "
    "Tensor new, Tensor(b!) bounds, Tensor(c!) sets, SymInt serial) -> Tensor",
    **UNCAPTURED,
)
def update_rows_op(
    keys: list[torch.Tensor],
    slots: list[torch.Tensor],
    kinds: list[int],
    positions: torch.Tensor,
    new: torch.Tensor,
    bounds: torch.Tensor,
    sets: torch.Tensor,
    serial: int,
) -> torch.Tensor:
    """Run `LengthHooks.update_rows` of the registered hooks and return every row, `[B, F]`.

    Args:
        keys: Keys of each layer that may need re-rotation, `[B, K, S, D]`.
        slots: Their positions, `[B, S]` each.
        kinds: Their layer types, as indices.
        positions: See `LengthHooks.update_rows`.
        new: See `LengthHooks.update_rows`.
        bounds: See `LengthHooks.update_rows`.
        sets: See `LengthHooks.update_rows`.
        serial: What `register_hooks` returned.
    """
    hooks = _instances[serial]
    names = list(hooks.slices)
    cached = [(k, s, names[i]) for k, s, i in zip(keys, slots, kinds, strict=True)]
    next_positions = hooks.generation_loop.take(None)
    rows = hooks.update_rows(
        bounds, sets, positions, new, lambda: cached, next_positions=next_positions
    )
    return rows.expand(positions.shape[0], -1).clone()


@update_rows_op.register_fake
def _(keys, slots, kinds, positions, new, bounds, sets, serial):
    return positions.new_empty(sets.shape, dtype=torch.float32)


class TraceRefusal:
    """Pre-hook on a decoder that refuses torch.jit.trace of length-dependent frequencies."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and torch.jit.is_tracing():
            raise Refused(
                f"torch.jit.trace would keep the frequencies of {self.method} for the length that "
                "it sees, and use them for every other: use torch.export or torch.compile, or "
                "patch with a method whose frequencies stay, such as yarn"
            )
