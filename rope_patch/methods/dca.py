"""Dual chunk attention (arXiv:2402.17463): positions start anew in each chunk of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.methods.base import option, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, require_window
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused, did_you_mean

if TYPE_CHECKING:
    import torch

# Chunk and largest query position, as parts of the trained length c.
_SIZES = {"paper": (3 / 4, 1.0), "released": (5 / 8, 3 / 4)}


@register_method(
    "dca", paper="ChunkLlama (dual chunk attention), arXiv:2402.17463", training="not needed"
)
@dataclass(frozen=True, kw_only=True)
class DCA(PositionMap):
    """Dual chunk attention: exact inside a chunk and to the last one, one far position beyond.

    Keys stand at j mod s in their chunk of s tokens. A query stands at i mod s for its own chunk,
    at min(i mod s + s, top) for the one before, and at min(2 s - 1, top) for older ones. The paper
    has s = 3/4 c and top = c - 1, for a trained length c. The released code, and vLLM and SGLang
    after it, has s = 5/8 c (11/16 c for Qwen) and top = 3/4 c. The code multiplies logits by a
    temperature that the paper lacks, and leaves old keys at an older one; here it is log-n, exact
    for each query.

    Attributes:
        sizes: "paper" or "released": where chunk and top come from, unless given.
        chunk: Tokens of a chunk, s.
        top: The largest position of a query.
    """

    sizes: str = option(
        "whose sizes: paper (3/4 c, c - 1) or released (5/8 c, 3/4 c)", default="paper"
    )
    chunk: int | None = option("tokens of a chunk; by `sizes` unless given", default=None)
    top: int | None = option("largest position of a query; by `sizes` unless given", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes not in _SIZES:
            raise Refused(
                f"sizes must be one of {', '.join(_SIZES)}, got {self.sizes!r}"
                f"{did_you_mean(str(self.sizes), _SIZES)}"
            )
        for name in ("chunk", "top"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def chunk_of(self, reach: int) -> int:
        """Return the tokens of a chunk."""
        return max(1, int(reach * _SIZES[self.sizes][0])) if self.chunk is None else int(self.chunk)

    def top_of(self, reach: int) -> int:
        """Return the largest position of a query."""
        if self.top is not None:
            return int(self.top)
        return min(reach - 1, int(reach * _SIZES[self.sizes][1]))

    def map_start(self, reach: int) -> int:
        return reach

    def longest_text(self, reach: int) -> float:
        chunk, top = self.chunk_of(reach), self.top_of(reach)
        require_window("chunk", chunk, reach)
        require_window("top", top, reach)
        if top < chunk - 1:
            raise Refused(
                f"top must be at least chunk - 1, the last position of a query in its own chunk, "
                f"{chunk - 1:,}, got {top:,}"
            )
        return math.inf

    def describe_distances(self, reach: int) -> str:
        chunk, top = self.chunk_of(reach), self.top_of(reach)
        return f"exact within chunks of {chunk:,} tokens and near the last one, at {top:,} beyond"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        chunk, top = self.chunk_of(reach), self.top_of(reach)
        place = queries % chunk
        own = queries - place  # where the query's chunk begins
        before = (own - chunk).clamp(min=0)
        return [
            Region(start=own, stop=queries + 1),
            Region(
                start=before,
                stop=own,
                query_shift=(top - chunk - place).clamp(max=0).double(),
            ),
            Region(
                start=torch.zeros_like(queries),
                stop=before,
                query_shift=(min(2 * chunk - 1, top) - queries).double(),
                key_shift=(keys % chunk - keys).double(),
                key_rule=("modulo", chunk),
            ),
        ]
