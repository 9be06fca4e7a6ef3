"""The rotation of Llama 3.1 (arXiv:2407.21783; formula in Meta's reference code).

Pairs with wavelengths below trained_length / high_freq_factor are kept, those above trained_length
/ low_freq_factor are interpolated. Between them the share is linear in the rotations of a pair
within the trained length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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


@register_method("llama3", paper="Llama 3.1, arXiv:2407.21783", training="not needed, but helps")
@dataclass(frozen=True, kw_only=True)
class Llama3(Method):
    """Llama 3.1's: like NTK-by-parts, with the ramp over turns and no attention factor."""

    low_freq_factor: float = option(
        "pairs that turn less often are fully interpolated", default=1.0
    )
    high_freq_factor: float = option("pairs that turn more often are kept", default=4.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("low_freq_factor", self.low_freq_factor)
        require_number("high_freq_factor", self.high_freq_factor)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise Refused(
                "low_freq_factor must be above 0 and below high_freq_factor, got "
                f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}"
            )

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        inv_freq = geometry.inv_freq()
        rotations = geometry.trained_length * inv_freq / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        plain_share = ((rotations - self.low_freq_factor) / span).clamp(0, 1)
        return Frequencies(inv_freq * plain_share + inv_freq / self.factor * (1 - plain_share))

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": float(self.factor),
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
            **original_rope_parameters(geometry),
        }
