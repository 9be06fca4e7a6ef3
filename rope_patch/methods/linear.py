"""Position Interpolation (Chen et al. 2023, arXiv:2306.15595, equation 4): every angle / factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.methods.registry import register_method


@register_method("linear", paper="Position Interpolation, arXiv:2306.15595", training="needed")
@dataclass(frozen=True, kw_only=True)
class Linear(Method):
    """Position interpolation: every frequency divided by the factor; costs short context."""

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        return Frequencies(geometry.inv_freq() / self.factor)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "linear",
            "factor": float(self.factor),
            "rope_theta": geometry.theta,
        }
