"""LaMPE (arXiv:2508.02308): far positions mapped onto a fixed span, whatever the length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.methods.base import option, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, near_region, require_window
from rope_patch.methods.registry import register_method

if TYPE_CHECKING:
    import torch

_STEPS_PER_DOUBLING = 4


@register_method("lampe", paper="LaMPE, arXiv:2508.02308", training="not needed")
@dataclass(frozen=True, kw_only=True)
class LaMPE(PositionMap):
    """LaMPE: near keys exact, far ones mapped onto a span of positions as m(p) = floor(p M / N).

    As in the released code, the relative position is i - j up to the head h, and m(i) - m(j) + h -
    m(h) - 1 beyond, with m(p) = floor(p M / (N - 1)) for a text of N tokens; the paper floors a
    function of i - j, which no cache of rotated keys can serve. The code counts the distance h
    twice in prompts and multiplies logits by 1.143; here it counts once, and the default
    temperature is log-n. The paper sets M by a sigmoid of the length, up to 3/4 of the trained one;
    the code takes it by hand (Llama-3-8B: M 3072, h 1024 or 2048 for RULER at 131,072 tokens).

    N grows by steps of 2^(1/4) with the tokens that a query sees, so prompts and steps agree.

    Attributes:
        mapped: M, the positions that a whole text is mapped onto.
        head: h, the distance up to which keys keep their own.
    """

    mapped: int | None = option(
        "positions that a text is mapped onto; 3/4 of the trained length unless given", default=None
    )
    head: int | None = option(
        "distance up to which keys keep their own; 1/8 of the trained length unless given",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mapped", "head"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def mapped_of(self, reach: int) -> int:
        """Return the positions that a text is mapped onto."""
        return max(1, 3 * reach // 4) if self.mapped is None else int(self.mapped)

    def head_of(self, reach: int) -> int:
        """Return the distance up to which keys keep their own."""
        return max(1, reach // 8) if self.head is None else int(self.head)

    def map_start(self, reach: int) -> int:
        return reach

    def longest_text(self, reach: int) -> float:
        require_window("head", self.head_of(reach), reach)
        reason = "the positions that the frequencies reach less head"
        require_window("mapped", self.mapped_of(reach), reach - self.head_of(reach), reason)
        return math.inf

    def texts(self, reach: int, last_query: int) -> list[int]:
        """Return the lengths N of the steps up to the one that serves the last query."""
        lengths = [reach]
        while lengths[-1] <= last_query:
            lengths.append(math.ceil(reach * 2 ** (len(lengths) / _STEPS_PER_DOUBLING)))
        return lengths

    def describe_distances(self, reach: int) -> str:
        head, mapped = self.head_of(reach), self.mapped_of(reach)
        return f"distances up to {head:,} exact, the whole text beyond on {mapped:,} positions"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        mapped, head = self.mapped_of(reach), self.head_of(reach)
        near = near_region(queries, head + 1)
        regions, first = [near], 0
        for length in self.texts(reach, last_query):
            is_member = (queries >= first) & (queries < length)
            first = length
            scale = mapped / (length - 1) if length > 1 else 1.0
            at_head = math.floor(scale * head)
            regions.append(
                Region(
                    start=torch.zeros_like(queries),
                    stop=torch.where(is_member, near.start, 0),
                    query_shift=torch.floor(scale * queries.double())
                    + (head - at_head - 1)
                    - queries,
                    key_shift=torch.floor(scale * keys.double()) - keys,
                    key_rule=("scaled", scale),
                )
            )
        return regions
