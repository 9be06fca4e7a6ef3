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
    "rope_patch::update_rows",
    mutates_args=("keys", "row_spans", "frequencies"),
    # torch 2.6 cannot infer a schema from list[torch.Tensor].
    schema="(Tensor(a!)[] keys, Tensor[] slots, SymInt[] layer_types, Tensor positions, "
    "Tensor new_positions, Tensor(b!) row_spans, Tensor(c!) frequencies, SymInt op_handle) "
    "-> Tensor",
    **UNCAPTURED,
)
def update_rows_op(
    keys: list[torch.Tensor],
    slots: list[torch.Tensor],
    layer_types: list[int],
    positions: torch.Tensor,
    new_positions: torch.Tensor,
    row_spans: torch.Tensor,
    frequencies: torch.Tensor,
    op_handle: int,
) -> torch.Tensor:
    """Run `LengthHooks.update_rows` of the registered hooks and return every row, `[B, F]`.

    Args:
        keys: Keys of each layer that may need re-rotation, `[B, K, S, D]`.
        slots: Their positions, `[B, S]` each.
        layer_types: Their layer types, as indices.
        positions: See `LengthHooks.update_rows`.
        new_positions: See `LengthHooks.update_rows`.
        row_spans: See `LengthHooks.update_rows`.
        frequencies: See `LengthHooks.update_rows`.
        op_handle: The number from `register_hooks`.
    """
    hooks = _instances[op_handle]
    names = list(hooks.slices)
    cached = [(k, s, names[i]) for k, s, i in zip(keys, slots, layer_types, strict=True)]
    next_positions = hooks.generation_loop.take(None)
    rows = hooks.update_rows(
        row_spans,
        frequencies,
        positions,
        new_positions,
        lambda: cached,
        next_positions=next_positions,
    )
    return rows.expand(positions.shape[0], -1).clone()


@update_rows_op.register_fake
def _(keys, slots, layer_types, positions, new_positions, row_spans, frequencies, op_handle):
    return positions.new_empty(frequencies.shape, dtype=torch.float32)


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
