"""STRING (arXiv:2410.18745): far distances shifted back onto well-trained ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rope_patch.methods.base import option, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, near_region, require_window
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch


@register_method("string", paper="STRING, arXiv:2410.18745", training="not needed")
@dataclass(frozen=True, kw_only=True)
class STRING(PositionMap):
    """STRING: distances from an offset on are moved back, so the rarest ones are never used.

    The relative position is i - j below the offset, and i - j - offset + local beyond. It acts
    within the trained length, whose last distances a model has hardly seen; beyond it, it reaches
    offset - local tokens further, or as far as the frequencies below it (`on="yarn:4"`). The paper
    has offset = 1/3 of the trained length and local = 128. The released code counts the distance
    `offset` twice in prompts, once in single steps, and multiplies logits by 1.143; here each
    distance counts once, and no temperature is the default.

    Attributes:
        offset: The first distance that is moved.
        local: The distance that it is moved to.
    """

    default_temperature: ClassVar[str] = "none"

    offset: int | None = option(
        "first distance that is moved; a third of the trained length unless given", default=None
    )
    local: int | None = option("distance that it is moved to; 128 unless given", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("offset", "local"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def offset_of(self, reach: int) -> int:
        """Return the first distance that is moved."""
        return max(1, reach // 3) if self.offset is None else int(self.offset)

    def local_of(self, reach: int) -> int:
        """Return the distance that the offset is moved to."""
        return min(128, self.offset_of(reach) // 2) if self.local is None else int(self.local)

    def map_start(self, reach: int) -> int:
        return self.offset_of(reach)

    def longest_text(self, reach: int) -> float:
        offset, local = self.offset_of(reach), self.local_of(reach)
        require_window("offset", offset, reach)
        if local >= offset:
            raise Refused(
                f"local must be below the offset, {offset:,}, because distances are moved back, "
                f"got {local:,}"
            )
        return reach + offset - local

    def describe_distances(self, reach: int) -> str:
        offset, local = self.offset_of(reach), self.local_of(reach)
        return f"distances from {offset:,} on are moved back to {local:,} and on"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        offset, local = self.offset_of(reach), self.local_of(reach)
        near = near_region(queries, offset)
        moved = torch.full_like(queries, local - offset, dtype=torch.float64)
        return [near, Region(torch.zeros_like(queries), near.start, query_shift=moved)]
