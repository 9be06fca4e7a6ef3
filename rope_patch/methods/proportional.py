"""p-RoPE (Barbero et al. 2024, arXiv:2410.06205): the lowest frequencies stop rotating.

The other pairs keep their frequencies; exponents are counted over the whole head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method, option, require_number
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method("proportional", paper="p-RoPE, arXiv:2410.06205", training="needed")
@dataclass(frozen=True, kw_only=True)
class Proportional(Method):
    """p-RoPE: the slowest pairs stop rotating and carry content alone."""

    partial_rotary_factor: float = option("share of the pairs that go on rotating", default=0.75)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("partial_rotary_factor", self.partial_rotary_factor)
        if not 0 < self.partial_rotary_factor <= 1:
            raise Refused(
                "partial_rotary_factor must be above 0 and at most 1, got "
                f"{self.partial_rotary_factor}"
            )

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        rotating = int(self.partial_rotary_factor * geometry.rotary_dim // 2)
        inv_freq = geometry.inv_freq()
        inv_freq[rotating:] = 0.0
        return Frequencies(inv_freq)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "proportional",
            "factor": 1.0,  # transformers would also divide the rotating pairs
            "partial_rotary_factor": float(self.partial_rotary_factor),
            "rope_theta": geometry.theta,
        }
