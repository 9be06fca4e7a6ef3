"""NTK-by-parts (YaRN paper, arXiv:2309.00071, section 3.2): interpolate slow pairs, keep fast ones.

As in the YaRN authors' code the ramp is linear in the pair's index; the paper's text has it linear
in the number of turns, which is not the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import (
    Frequencies,
    Method,
    option,
    original_rope_parameters,
    require_number,
)
from rope_patch.methods.registry import register

if TYPE_CHECKING:
    import torch


@register(
    "ntk-by-parts",
    paper="NTK-by-parts, arXiv:2309.00071 section 3.2",
    training="not needed, but helps",
)
@dataclass(frozen=True, kw_only=True)
class NTKByParts(Method):
    """YaRN's ramp without its attention factor: fast pairs kept, slow ones interpolated."""

    beta_fast: float = option(
        "pairs that turn more often within the trained length are kept", default=32.0
    )
    beta_slow: float = option("pairs that turn less often are fully interpolated", default=1.0)
    truncate: bool = option("round the ramp's ends outwards to whole pairs", default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("beta_fast", self.beta_fast)
        require_number("beta_slow", self.beta_slow)
        if not isinstance(self.truncate, bool):
            raise TypeError(f"truncate must be True or False, got {self.truncate!r}")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                "beta_slow must be above 0 and below beta_fast, got "
                f"beta_slow={self.beta_slow}, beta_fast={self.beta_fast}"
            )

    def ramp_bounds(self, geometry: Geometry) -> tuple[float, float]:
        """The pairs, not necessarily whole ones, at which the ramp starts and ends."""
        low = geometry.pair_with_rotations(self.beta_fast)
        high = geometry.pair_with_rotations(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper clamp is R - 1, not R / 2 - 1, in every implementation: kept, to rotate alike.
        low, high = max(low, 0), min(high, geometry.rotary_dim - 1)
        # A step instead of a division by zero.
        return (low, high) if low != high else (low, high + 0.001)

    def ramp(self, geometry: Geometry) -> torch.Tensor:
        """How far each pair is interpolated: 0 keeps it, 1 divides by the factor, `[R / 2]`."""
        import torch

        low, high = self.ramp_bounds(geometry)
        pair = torch.arange(geometry.rotary_dim // 2, dtype=torch.float64, device="cpu")
        return ((pair - low) / (high - low)).clamp(0, 1)

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        inv_freq, ramp = geometry.inv_freq(), self.ramp(geometry)
        return Frequencies(
            inv_freq * (1 - ramp) + inv_freq / self.factor * ramp, self.cos_sin_factor()
        )

    def cos_sin_factor(self) -> float:
        """The multiplier of cos and sin."""
        return 1.0

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        # transformers reads `truncate` from the wrong level where layer types differ, so there the
        # explicit form is the only one that rotates alike.
        if not self.truncate and geometry.layer_type is not None:
            return super().rope_parameters(geometry)
        spelled = {
            "rope_type": "yarn",
            "factor": float(self.factor),
            **original_rope_parameters(geometry),
        }
        # Only what differs from the defaults of every engine: some of them know no more keys.
        if (self.beta_fast, self.beta_slow) != (32, 1):
            spelled |= {"beta_fast": float(self.beta_fast), "beta_slow": float(self.beta_slow)}
        if not self.truncate:
            spelled["truncate"] = False
        if (attention_factor := self.cos_sin_factor()) != yarn_mscale(self.factor):
            spelled["attention_factor"] = attention_factor
        return spelled


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's multiplier of cos and sin, 0.1 ln(factor) + 1 (arXiv:2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0
