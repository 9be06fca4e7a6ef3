"""Keys cached under older frequencies: what a cache remembers of them.

A cache of a model whose frequencies follow the sequence carries a record of the positions its keys
were rotated at and of the frequencies they were rotated by. The record goes where the rows go: it
is reordered, repeated, selected, copied and pickled with the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

UNKNOWN = torch.nan


@dataclass
class Record:
    """How the keys of a cache are rotated. B rows, S slots.

    What decides about rotation lies on the CPU, so that a decoding step need not wait for a device
    to know that nothing changes.

    Attributes:
        owner: Which patch wrote `bounds`; under another one they have to be read anew.
        positions: Where each slot's key was rotated at, -1 for slots without a token, `[B, S]`.
        bounds: First position of each row, the largest that the last one can be, and the length
            that its frequencies serve (see `Method.reach`); `[B, 3]`, float64, on the CPU; NaN
            where unknown.
        sets: The frequencies of each row's keys, one layer type's after another's, `[B, F]`,
            float64, on the CPU; NaN where there are none yet.
    """

    owner: str
    positions: torch.Tensor
    bounds: torch.Tensor
    sets: torch.Tensor

    def rearranged(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> Record:
        """The record of a cache whose rows went through `rows`, a function of `[B, ...]`."""
        return Record(self.owner, rows(self.positions), rows(self.bounds), rows(self.sets))

    def cut(self, slots: int) -> None:
        """Forgets all but the first slots, as the cache did when it was cropped."""
        self.positions = self.positions[:, :slots]
        self.bounds = torch.full_like(self.bounds, UNKNOWN)


class Remembering(Cache):
    """What a cache becomes that carries a record; see `remember`."""

    rotation: Record | None = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._rearrange(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rearrange(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._rearrange(lambda rows: rows[indices.to(rows.device)])

    def reset(self) -> None:
        super().reset()
        self.rotation = None

    def _rearrange(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rotation is not None:
            self.rotation = self.rotation.rearranged(rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time: copies and pickles name the one that it was made from.
        return _revive, type(self).__bases__[1:], self.__dict__


_KINDS: dict[type, type] = {}


def remember(cache: Any, record: Record) -> None:
    """Gives a cache a record, which from then on follows whatever is done to its rows."""
    if not isinstance(cache, Remembering) and not torch.compiler.is_compiling():
        # Within a compiled graph an object's class is fixed; the next call outside makes up for it.
        cache.__class__ = _remembering(type(cache))
    cache.rotation = record


def recall(cache: Any) -> Record | None:
    """The record of a cache, or None."""
    return getattr(cache, "rotation", None)


def _remembering(kind: type) -> type:
    if kind not in _KINDS:
        _KINDS[kind] = type(kind.__name__, (Remembering, kind), {"__module__": kind.__module__})
    return _KINDS[kind]


def _revive(kind: type) -> Any:
    return object.__new__(_remembering(kind))
