"""DPE (arXiv:2504.18857): groups of far keys, of another size for each part of a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, option, require_tokens
from rope_patch.methods.position_map import (
    PositionMap,
    Region,
    longest_grouped_text,
    near_region,
    require_window,
)
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch


@register_method("dpe", paper="DPE, arXiv:2504.18857", training="not needed")
@dataclass(frozen=True, kw_only=True)
class DPE(PositionMap):
    """DPE: Self-Extend with a group size of its own for each part of the rotated pairs.

    The group sizes come from a search on one model. The code has, for parts of eight pairs and a
    window of 1,024: 2,8,2,8,32,32,32,4 (Llama-3-8B), 2,32,32,2,2,2,2,1 (Llama-3.1-8B),
    4,16,2,16,32,16,16,2 (Mistral-7B-v0.2) and 2,16,8,8,32,8,2,4 (Qwen2.5-7B). It can leave pairs
    of small norm in a head ungrouped; here all pairs of a part are grouped alike.

    Attributes:
        groups: Group sizes, from the fastest pairs to the slowest; equal parts of the pairs.
        window: Keys that keep their own distance; an eighth of the trained length unless given.
    """

    groups: Sequence[int] = option(
        "group sizes of equal parts of the pairs, such as 2,8,2,8,32,32,32,4"
    )
    window: int | None = option("tokens that keep their exact distance", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.groups, str) or not isinstance(self.groups, Sequence) or not self.groups:
            raise TypeError(
                f"groups must be whole numbers, such as [2, 8, 32, 4], got {self.groups!r}"
            )
        for group in self.groups:
            require_tokens("groups", group)
        object.__setattr__(self, "groups", tuple(int(group) for group in self.groups))
        if self.window is not None:
            require_tokens("window", self.window)

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        pairs = geometry.rotary_dim // 2
        if pairs % len(self.groups):
            raise Refused(
                f"groups must divide the {pairs} rotated pairs into equal parts, got "
                f"{len(self.groups)} group sizes"
            )
        return super().frequencies(geometry, seq_len)

    def window_of(self, reach: int) -> int:
        """Return the window in tokens."""
        return max(1, reach // 8) if self.window is None else int(self.window)

    def map_start(self, reach: int) -> int:
        return reach

    def longest_text(self, reach: int) -> float:
        # The largest group decides: with the authors' sizes, other pairs leave the reach.
        window = self.window_of(reach)
        require_window("window", window, reach)
        return longest_grouped_text(reach, window, max(self.groups))

    def describe_distances(self, reach: int) -> str:
        window, low, high = self.window_of(reach), min(self.groups), max(self.groups)
        return f"distances below {window:,} exact, beyond it groups of {low} to {high} by pair"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        window = self.window_of(reach)
        near = near_region(queries, window)
        groups = torch.tensor(self.groups, device=queries.device)
        query_floor, key_floor = (
            torch.div(x[..., None], groups, rounding_mode="floor") for x in (queries, keys)
        )
        moved = query_floor + window - torch.div(window, groups, rounding_mode="floor")
        far = Region(
            start=torch.zeros_like(queries),
            stop=near.start,
            query_shift=(moved - queries[..., None]).double(),
            key_shift=(key_floor - keys[..., None]).double(),
            key_rule=("floors", self.groups),
        )
        return [near, far]
