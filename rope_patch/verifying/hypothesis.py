"""A hypothesis: one rotation that an engine may have, computed by the reference model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rope_patch.extension import Extension
from rope_patch.methods.base import Rotation

AS_ASKED = "as-asked"
WRAPS, CLAMPS = "wraps", "clamps"


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One rotation that an engine may have.

    Attributes:
        name: A short name, for JSON and tables.
        says: What the engine does if the hypothesis is true; a clause that follows "the engine".
        rotation: The rotation of a sequence of some tokens.
        request: The request that `patch` applies, for what frequencies alone do not express; None
            if frequencies are all.
        table_rows: Rows of the engine's table of cos and sin; None if it has enough.
        table_end: What happens to positions beyond the table: "wraps" or "clamps".
        keeps_stale_keys: Whether cached keys keep the rotation of their time as the text grows.
    """

    name: str
    says: str
    rotation: Callable[[int], Rotation]
    request: Extension | None = None
    table_rows: int | None = None
    table_end: str = WRAPS
    keeps_stale_keys: bool = False

    def same_as(self, other: Hypothesis, lengths: list[int]) -> bool:
        """Return whether two hypotheses without requests describe one rotation."""
        return (
            self.table_rows == other.table_rows
            and self.table_end == other.table_end
            and self.keeps_stale_keys == other.keeps_stale_keys
            and all(self.rotation(n).close_to(other.rotation(n)) for n in lengths)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return name and sentence, for JSON."""
        return {"name": self.name, "says": f"the engine {self.says}"}
