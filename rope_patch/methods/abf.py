"""Adjusted base frequency (Xiong et al. 2023, arXiv:2309.16039): pretrain on with a larger theta.

The default base is the critical base of Liu et al. (arXiv:2310.05209, theorem 2): the pair that
made one rotation in the trained length makes one in the target length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method, option, require_number
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method(
    "abf", paper="ABF, arXiv:2309.16039; base from arXiv:2310.05209", training="needed"
)
@dataclass(frozen=True, kw_only=True)
class ABF(Method):
    """Adjusted base frequency: a larger theta, given or derived from the target length."""

    new_theta: float | None = option(
        "the new rope base; derived from the target length unless given", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_theta is not None:
            require_number("new_theta", self.new_theta)
            if self.new_theta <= 1:
                raise Refused(f"new_theta must be above 1, got {self.new_theta}")

    def theta(self, geometry: Geometry) -> float:
        """Return the base of the scaled rotation.

        Raises:
            ValueError: `new_theta` is below the model's base, or the trained length is too short to
                derive a base from.
        """
        if self.new_theta is not None:
            if self.new_theta < geometry.theta:
                raise Refused(
                    f"new_theta must be above the model's own theta, {geometry.theta:g}, got "
                    f"{self.new_theta:g}: a smaller base shortens the reach"
                )
            return float(self.new_theta)
        trained = geometry.trained_length / (2 * math.pi)
        if trained <= 1:
            raise Refused(
                f"a trained_length of {geometry.trained_length} tokens is less than one turn of "
                "the fastest pair, too short to derive a base from; pass new_theta=..."
            )
        return geometry.theta ** (math.log(trained * self.factor) / math.log(trained))

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        return Frequencies(geometry.inv_freq(self.theta(geometry)))

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.theta(geometry)}
