"""The rotation of pretraining: theta^(-2i / R), without stretch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.methods.registry import register_method


@register_method("default", paper="RoFormer, arXiv:2104.09864", training="not needed")
@dataclass(frozen=True, kw_only=True)
class Default(Method):
    """Plain RoPE, the baseline: no frequency changes."""

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        return Frequencies(geometry.inv_freq())

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": geometry.theta}
