"""DroPE (arXiv:2512.12167): drop the positions from a model that was trained with them.

No pair rotates. A short training at the original length recalibrates the model, which then sees the
order only through its causal mask. Beyond that length attention logits are multiplied by
1 + temperature * ln(n / trained_length), and so cos and sin by its square root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, option, require_number
from rope_patch.methods.growth import LengthGrowth
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method("nope", paper="DroPE, arXiv:2512.12167", training="needed")
@dataclass(frozen=True, kw_only=True)
class NoPE(LengthGrowth):
    """DroPE: no rotation at all; train at the original length, then read as far as it carries."""

    temperature: float = option(
        "logits beyond the trained length are multiplied by 1 + temperature * "
        "ln(n / trained_length); the paper's are 0.103 (SmolLM) and 0.412 (494M, from scratch)",
        default=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("temperature", self.temperature)
        if self.temperature < 0:
            raise Refused(
                f"temperature must be at least 0 (0: logits stay as they are), got "
                f"{self.temperature}"
            )

    @property
    def has_config_form(self) -> bool:
        return self.temperature == 0

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        if self.temperature and geometry.rotary_dim < geometry.head_dim:
            raise Refused(
                f"temperature must be 0 where only a part of each head rotates, got "
                f"{self.temperature} with {geometry.rotary_dim} of {geometry.head_dim} dimensions "
                "rotated: it reaches the logits through cos and sin, which the others never meet"
            )
        ratio = self.factor if seq_len is None else seq_len / geometry.trained_length
        logit_scale = 1 + self.temperature * math.log(max(1.0, ratio))
        return Frequencies(geometry.inv_freq() * 0, math.sqrt(logit_scale))

    def valid_until(self, length: float, trained_length: int) -> float:
        return super().valid_until(length, trained_length) if self.temperature else math.inf

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return parameters without rotation; no config can express the temperature."""
        return {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.0,
            "rope_theta": geometry.theta,
        }

    def __str__(self) -> str:
        return f"{self.name}, temperature {self.temperature:g}" if self.temperature else self.name
