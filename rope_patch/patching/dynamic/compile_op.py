"""Following lengths within torch.compile: one operator, so that no number gets into the graph.

Whether a step changes any frequencies depends on lengths. Read in the graph they would break it or
be compiled in; behind an operator they are looked at when the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

_instances: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register_hooks(following: Any) -> int:
    """Makes a `Following` known to the operator, by a number; it is not kept alive by that."""
    serial = next(_handles)
    _instances[serial] = following
    return serial


# CUDA graphs would replay what the numbers said when they were recorded.
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
    """`Following.update_rows` of the one that was announced as `serial`, for every row, `[B, F]`.

    Args:
        keys: Of each layer that may have to be turned, `[B, K, S, D]`.
        slots: Where they were rotated at, `[B, S]` each.
        kinds: Which layer types they belong to, as indices.
        positions: See `Following.update_rows`.
        new: See `Following.update_rows`.
        bounds: See `Following.update_rows`.
        sets: See `Following.update_rows`.
        serial: What `register_hooks` returned.
    """
    following = _instances[serial]
    names = list(following.parts)
    cached = [(k, s, names[i]) for k, s, i in zip(keys, slots, kinds, strict=True)]
    at = following.loop.take(None)
    rows = following.settle(bounds, sets, positions, new, lambda: cached, at=at)
    return rows.expand(positions.shape[0], -1).clone()


@update_rows_op.register_fake
def _(keys, slots, kinds, positions, new, bounds, sets, serial):
    return positions.new_empty(sets.shape, dtype=torch.float32)


class TraceRefusal:
    """Ahead of a decoder's forward: refuses to trace frequencies that follow lengths."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and torch.jit.is_tracing():
            raise ValueError(
                f"torch.jit.trace would keep the frequencies of {self.method} for the length that "
                "it sees, and use them for every other: use torch.export or torch.compile, or "
                "patch with a method whose frequencies stay, such as yarn"
            )
