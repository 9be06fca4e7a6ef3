"""StreamingLLM (arXiv:2309.17453): the last keys and a few first ones, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rope_patch.methods.base import option, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, require_window
from rope_patch.methods.registry import register_method

if TYPE_CHECKING:
    import torch


@register_method("streaming", paper="StreamingLLM, arXiv:2309.17453", training="not needed")
@dataclass(frozen=True, kw_only=True)
class Streaming(PositionMap):
    """StreamingLLM: attention sinks and the last keys, at the positions of a cache of both.

    A query stands at min(i, sinks + window - 1) for the sinks, and at its own distance from the
    last keys. The text stays fluent at any length, and what left the window is forgotten: the
    context does not grow. Here the cache keeps all keys, and attention skips those between.

    Attributes:
        window: Last keys that are seen; the trained length less the sinks unless given.
        sinks: First keys that are seen.
    """

    default_temperature: ClassVar[str] = "none"

    window: int | None = option("last tokens that are seen", default=None)
    sinks: int = option("first tokens that are seen", default=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "sinks"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def window_of(self, reach: int) -> int:
        """Return the last keys that are seen."""
        return max(1, reach - int(self.sinks)) if self.window is None else int(self.window)

    def map_start(self, reach: int) -> int:
        return self.window_of(reach) + int(self.sinks)

    def longest_text(self, reach: int) -> float:
        reason = "one above the positions that the frequencies reach"
        require_window("sinks + window", self.map_start(reach), reach + 1, reason)
        return math.inf

    def describe_distances(self, reach: int) -> str:
        return (
            f"the last {self.window_of(reach):,} tokens and the first {self.sinks:,}, side by "
            "side, none between"
        )

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        sinks, window = int(self.sinks), self.window_of(reach)
        near = Region(start=(queries - window + 1).clamp(min=sinks), stop=queries + 1)
        far = Region(
            start=torch.zeros_like(queries),
            stop=(queries + 1).clamp(max=sinks),
            query_shift=(sinks + window - 1 - queries).clamp(max=0).double(),
        )
        return [near, far]
