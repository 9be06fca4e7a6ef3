"""What a small copy of a model did with positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TableSighting:
    """A module whose output was consecutive rows of a matrix of its own.

    Attributes:
        module: The module's name in the model.
        attribute: The matrix in it, a parameter or a buffer.
        first_row: The row of position 0.
        fields: The config's fields that decide how many rows there are.
        companions: Buffers that grow with the same fields, with `*` for the numbers of layers.
        initial: The matrix of the untrained copy.
    """

    module: str
    attribute: str
    first_row: int
    fields: tuple[str, ...]
    companions: tuple[str, ...]
    initial: torch.Tensor


@dataclass(frozen=True)
class BiasSighting:
    """A module that was handed a bias which is linear in the key's position.

    Attributes:
        module: The module's name in the model; it is in the first layer.
        argument: The bias's name among its arguments.
        from_end: Whether the bias is 0 for the last key, not for the first.
    """

    module: str
    argument: str
    from_end: bool


@dataclass(frozen=True)
class BucketSighting:
    """A module that read a small table by a matrix of distances.

    Attributes:
        module: The module's name in the model.
        shape: Queries and keys.
    """

    module: str
    shape: torch.Size


@dataclass
class Sightings:
    """What a model did with positions.

    Attributes:
        tables: Matrices of which consecutive rows were read.
        slopes: Modules that were handed a bias which is linear in the key's position.
        unread: Tables that follow the length of those that were read, but showed no rows.
        buckets: Modules that read a small table by a matrix of distances.
    """

    tables: list[TableSighting] = field(default_factory=list)
    slopes: list[BiasSighting] = field(default_factory=list)
    buckets: list[BucketSighting] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
