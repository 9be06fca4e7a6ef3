"""NTK-aware scaling (bloc97 2023; YaRN paper, arXiv:2309.00071, definition 1).

The base becomes theta * factor^(R / (R - 2)): the slowest pair is interpolated by `factor`, the
fastest keeps its frequency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method(
    "ntk", paper="NTK-aware, arXiv:2309.00071 section 3.1", training="not needed for small factors"
)
@dataclass(frozen=True, kw_only=True)
class NTK(Method):
    """NTK-aware: a larger base, so that slow pairs stretch by the factor and fast ones hardly."""

    def theta(self, geometry: Geometry) -> float:
        """Return the base of the scaled rotation.

        Raises:
            ValueError: Only one pair rotates, so the formula divides by zero.
        """
        if geometry.rotary_dim <= 2:
            raise Refused(f"ntk needs rotary_dim above 2, got {geometry.rotary_dim}")
        return geometry.theta * self.factor ** (geometry.rotary_dim / (geometry.rotary_dim - 2))

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        return Frequencies(geometry.inv_freq(self.theta(geometry)))

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.theta(geometry)}
