"""LM-Infinite (arXiv:2308.16137): the last keys and the first ones, at a limited distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rope_patch.methods.base import option, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, near_region, require_window
from rope_patch.methods.registry import register_method

if TYPE_CHECKING:
    import torch


@register_method("lm-infinite", paper="LM-Infinite, arXiv:2308.16137", training="not needed")
@dataclass(frozen=True, kw_only=True)
class LMInfinite(PositionMap):
    """LM-Infinite: a window of keys and the first keys of the text; all between is not seen.

    The first keys stand at the distance `limit` once they leave the window. The text stays fluent
    at any length, and what left the window is forgotten. The released code has 10 to 100 first
    keys, and the trained length as window and limit.

    Attributes:
        window: Last keys that are seen; one less than the trained length unless given.
        sinks: First keys that are seen.
        limit: The distance of the first keys; the window unless given.
    """

    default_temperature: ClassVar[str] = "none"

    window: int | None = option("last tokens that are seen", default=None)
    sinks: int = option("first tokens that are seen", default=10)
    limit: int | None = option(
        "distance of the first tokens; the window unless given", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "sinks", "limit"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def window_of(self, reach: int) -> int:
        """Return the last keys that are seen."""
        return reach - 1 if self.window is None else int(self.window)

    def limit_of(self, reach: int) -> int:
        """Return the distance of the first keys."""
        return self.window_of(reach) if self.limit is None else int(self.limit)

    def map_start(self, reach: int) -> int:
        return self.window_of(reach)

    def longest_text(self, reach: int) -> float:
        require_window("window", self.window_of(reach), reach)
        require_window("limit", self.limit_of(reach), reach)
        return math.inf

    def describe_distances(self, reach: int) -> str:
        window, limit = self.window_of(reach), self.limit_of(reach)
        return (
            f"the last {window:,} tokens at their distance, the first {self.sinks:,} at {limit:,}, "
            "none between"
        )

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        near = near_region(queries, self.window_of(reach))
        far = Region(
            start=torch.zeros_like(queries),
            stop=near.start.clamp(max=int(self.sinks)),
            query_shift=(self.limit_of(reach) - queries).double(),
            key_shift=-keys.double(),
            key_rule="unrotated",
        )
        return [near, far]
