"""NTK-by-parts (YaRN paper, arXiv:2309.00071, section 3.2): interpolate slow pairs, keep fast ones.

As in the YaRN authors' code, the ramp is linear in the pair's index. In the paper's text it is
linear in the number of rotations, which differs.
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
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch


@register_method(
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
            raise Refused(
                "beta_slow must be above 0 and below beta_fast, got "
                f"beta_slow={self.beta_slow}, beta_fast={self.beta_fast}"
            )

    def ramp_bounds(self, geometry: Geometry) -> tuple[float, float]:
        """Return the fractional pair indices at which the ramp starts and ends."""
        low = geometry.pair_with_rotations(self.beta_fast)
        high = geometry.pair_with_rotations(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # Every implementation clamps to R - 1, not R / 2 - 1, so this one does too.
        low, high = max(low, 0), min(high, geometry.rotary_dim - 1)
        # Avoid a division by zero: the ramp becomes a step.
        return (low, high) if low != high else (low, high + 0.001)

    def ramp(self, geometry: Geometry) -> torch.Tensor:
        """Return each pair's interpolation, `[R / 2]`: 0 keeps it, 1 divides it by the factor."""
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
        """Return the multiplier of cos and sin."""
        return 1.0

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        # With several layer types transformers reads `truncate` from the wrong level, so only the
        # explicit form rotates the same.
        if not self.truncate and geometry.layer_type is not None:
            return super().rope_parameters(geometry)
        parameters = {
            "rope_type": "yarn",
            "factor": float(self.factor),
            **original_rope_parameters(geometry),
        }
        # Only values that differ from every engine's defaults: some engines reject more keys.
        if (self.beta_fast, self.beta_slow) != (32, 1):
            parameters |= {"beta_fast": float(self.beta_fast), "beta_slow": float(self.beta_slow)}
        if not self.truncate:
            parameters["truncate"] = False
        if (attention_factor := self.cos_sin_factor()) != yarn_mscale(self.factor):
            parameters["attention_factor"] = attention_factor
        return parameters


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's multiplier of cos and sin, 0.1 ln(factor) + 1 (arXiv:2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0
