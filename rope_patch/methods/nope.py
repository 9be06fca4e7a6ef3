"""DroPE (arXiv:2512.12167): drop the positions from a model that was trained with them.

No pair rotates. A short training at the original length recalibrates the model, which then sees the
order only through its causal mask. Beyond that length the paper multiplies attention logits by
1 + c ln(n / trained_length): the temperature "drope:c".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.methods.registry import register_method


@register_method("nope", paper="DroPE, arXiv:2512.12167", training="needed")
@dataclass(frozen=True, kw_only=True)
class NoPE(Method):
    """DroPE: no rotation at all; train at the original length, then read as far as it carries."""

    is_dynamic: ClassVar[bool] = True  # it has no target length, and needs no factor

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        return Frequencies(geometry.inv_freq() * 0)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.0,
            "rope_theta": geometry.theta,
        }

    def __str__(self) -> str:
        return self.name
