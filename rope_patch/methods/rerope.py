"""ReRoPE and Leaky ReRoPE (Jianlin Su, kexue.fm/archives/9708): distances rectified at a window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.methods.base import option, require_number, require_tokens
from rope_patch.methods.position_map import PositionMap, Region, near_region, require_window
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch


@register_method("rerope", paper="ReRoPE, kexue.fm/archives/9708", training="not needed")
@dataclass(frozen=True, kw_only=True)
class ReRoPE(PositionMap):
    """ReRoPE: distances up to a window exact, all larger ones as if they were the window.

    The relative position is min(i - j, w), so a text of any length fits. The author finds windows
    of a quarter to a half of the trained length best; one as large as the trained length fails. His
    code always multiplies queries by max(1, ln(n) / ln(trained length)), which is the default
    temperature here.

    Attributes:
        window: Keys that keep their own distance; a quarter of the trained length unless given.
    """

    window: int | None = option("tokens that keep their exact distance", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            require_tokens("window", self.window)

    def window_of(self, reach: int) -> int:
        """Return the window in tokens."""
        return max(1, reach // 4) if self.window is None else int(self.window)

    def map_start(self, reach: int) -> int:
        return reach

    def longest_text(self, reach: int) -> float:
        require_window("window", self.window_of(reach), reach)
        return math.inf

    def describe_distances(self, reach: int) -> str:
        window = self.window_of(reach)
        return f"distances below {window:,} exact, all others as {window:,}"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        window = self.window_of(reach)
        near = near_region(queries, window)
        far = Region(
            start=torch.zeros_like(queries),
            stop=near.start,
            query_shift=(window - queries).double(),
            key_shift=-keys.double(),
            key_rule="unrotated",
        )
        return [near, far]


@register_method(
    "leaky-rerope", paper="Leaky ReRoPE, kexue.fm/archives/9708", training="not needed"
)
@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(ReRoPE):
    """Leaky ReRoPE: distances beyond a window grow k times as slowly.

    The relative position is i - j below the window w, and w + (i - j - w) / k beyond, so texts of
    up to w + (trained length - w) k tokens fit. The author's code has k = 16 and w = 512 at a
    trained length of 4,096.

    With k below 1 far distances grow faster, from the window on and within the trained length. That
    is for training alone (kexue.fm/archives/9728): short texts have the distances of long ones,
    which the model then reads without a map.

    Attributes:
        k: How many times as slowly far distances grow.
    """

    k: float = option(
        "how many times as slowly distances beyond the window grow; below 1 to train with",
        default=16.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("k", self.k)
        if self.k <= 0:
            raise Refused(
                f"k must be above 0 (far distances grow k times as slowly), got {self.k:g}"
            )

    def map_start(self, reach: int) -> int:
        return reach if self.k >= 1 else min(reach, self.window_of(reach))

    def longest_text(self, reach: int) -> float:
        window = self.window_of(reach)
        require_window("window", window, reach)
        return reach if self.k < 1 else math.floor(window + (reach - window) * self.k)

    def describe_distances(self, reach: int) -> str:
        window = self.window_of(reach)
        speed = f"1/{self.k:g}" if self.k >= 1 else f"{1 / self.k:g} times"
        return f"distances below {window:,} exact, beyond it growing {speed} as fast"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        window = self.window_of(reach)
        near = near_region(queries, window)
        slope = 1 - 1 / self.k
        far = Region(
            start=torch.zeros_like(queries),
            stop=near.start,
            query_shift=(window - queries.double()) * slope,
            key_shift=-keys.double() * slope,
            key_rule=("leaky", self.k),
        )
        return [near, far]
