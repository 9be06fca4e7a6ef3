"""Maps whose far keys share positions in groups of neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rope_patch.methods.base import option, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, near_region

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class GroupedMap(PositionMap):
    """A map that floors far positions by a group size, which may grow with the query.

    Attributes:
        window: Keys that keep their own distance.
        group: Neighbours that share a position; None for the smallest that the length allows.
    """

    window_includes_end: ClassVar[int] = 0  # 1 if a key `window` tokens back is near, too

    window: int | None = option("tokens that keep their exact distance", default=None)
    group: int | None = option(
        "neighbouring far tokens that share a position; grows with the text unless given",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "group"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def window_of(self, reach: int) -> int:
        """Return the window in tokens: a quarter of the reach unless given."""
        return max(1, reach // 4) if self.window is None else int(self.window)

    def group_at(self, query: int, reach: int) -> int:
        """Return the group size of the query at a position."""
        if self.group is not None:
            return int(self.group)
        return max(1, math.ceil((query + 1) / reach))

    def first_query_of(self, group: int, reach: int) -> int:
        """Return the first position whose query has that group size, if groups grow."""
        return (group - 1) * reach

    def shift(self, group: int, window: int) -> int:
        """Return what is added to the grouped distance."""
        return 0

    def map_start(self, reach: int) -> int:
        return reach

    def describe_distances(self, reach: int) -> str:
        near = self.window_of(reach) + self.window_includes_end
        size = "that grow with the text" if self.group is None else f"of {self.group:,}"
        return f"distances below {near:,} exact, farther tokens in groups {size}"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        window = self.window_of(reach)
        near = near_region(queries, window + self.window_includes_end)
        first_group = self.group_at(self.map_start(reach), reach)
        regions = [near]
        for group in range(first_group, max(first_group, self.group_at(last_query, reach)) + 1):
            is_member = torch.ones_like(queries, dtype=torch.bool)
            if self.group is None:
                first, behind = (self.first_query_of(g, reach) for g in (group, group + 1))
                is_member = (queries < behind) & ((queries >= first) | (group == first_group))
            floor = torch.div(queries, group, rounding_mode="floor")
            regions.append(
                Region(
                    start=torch.zeros_like(queries),
                    stop=torch.where(is_member, near.start, 0),
                    query_shift=(floor + self.shift(group, window) - queries).double(),
                    key_shift=(torch.div(keys, group, rounding_mode="floor") - keys).double(),
                    key_rule=("floor", group),
                )
            )
        return regions


def longest_grouped_text(reach: int, window: int, group: int) -> int:
    """Return the tokens whose positions floor(i/G) + w - floor(w/G) stay below the reach."""
    return (reach - window + window // group) * group
