"""Mixed windows (LongRoPE2, arXiv:2502.20082): short sequences keep the original rotation.

Sequences up to the trained length keep the rotation of pretraining, longer ones get the whole
factor. The model is trained on both, so it keeps its quality in short context. `Mixed` turns any
method into a mixed one: put it first among the bases, as the classes below do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.abf import ABF
from rope_patch.methods.base import Frequencies, Method, original_rope_parameters
from rope_patch.methods.linear import Linear
from rope_patch.methods.longrope import LongRoPE
from rope_patch.methods.ntk import NTK
from rope_patch.methods.ntk_by_parts import NTKByParts
from rope_patch.methods.registry import register_method
from rope_patch.methods.yarn import YaRN
from rope_patch.utils.errors import Refused


@dataclass(frozen=True, kw_only=True)
class Mixed(Method):
    """Mixin that applies the next base class only beyond the trained length.

    Each row is short or long by itself, a packed row by its longest document. If the inner method
    leaves attention alone, transformers' `longrope` with short factors of 1 expresses the same.
    transformers decides for the whole batch, though, and keeps stale cached keys at the border.
    `longrope` has one attention factor for short and long, so a method with an attention factor has
    no config form.
    """

    @property
    def has_config_form(self) -> bool:
        return super().has_config_form and not self.scales_attention()

    def scales_attention(self) -> bool:
        """Return whether the inner method's attention factor differs from 1."""
        return False

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        if seq_len is not None and seq_len <= geometry.trained_length:
            return Frequencies(geometry.inv_freq())
        return super().frequencies(geometry)  # type: ignore[safe-super]

    def valid_until(self, length: float, trained_length: int) -> float:
        return math.inf if length > trained_length else float(trained_length)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return `longrope` if it has the form, else the unscaled rotation of short sequences."""
        if not self.has_config_form:
            return {"rope_type": "default", "rope_theta": geometry.theta}
        stretch = geometry.inv_freq() / self.frequencies(geometry).inv_freq
        return {
            "rope_type": "longrope",
            "factor": float(self.factor),
            "long_factor": stretch.tolist(),
            "short_factor": [1.0] * len(stretch),
            "attention_factor": 1.0,
            **original_rope_parameters(geometry),
        }


@register_method("mixed-linear", paper="mixed windows, arXiv:2502.20082", training="needed")
@dataclass(frozen=True, kw_only=True)
class MixedLinear(Mixed, Linear):
    """Position interpolation beyond the trained length, the original rotation up to it."""


@register_method(
    "mixed-ntk", paper="mixed windows, arXiv:2502.20082", training="not needed, but helps"
)
@dataclass(frozen=True, kw_only=True)
class MixedNTK(Mixed, NTK):
    """NTK-aware beyond the trained length, the original rotation up to it."""


@register_method(
    "mixed-ntk-by-parts", paper="mixed windows, arXiv:2502.20082", training="not needed, but helps"
)
@dataclass(frozen=True, kw_only=True)
class MixedNTKByParts(Mixed, NTKByParts):
    """NTK-by-parts beyond the trained length, the original rotation up to it."""


@register_method(
    "mixed-yarn", paper="mixed windows, arXiv:2502.20082", training="not needed, but helps"
)
@dataclass(frozen=True, kw_only=True)
class MixedYaRN(Mixed, YaRN):
    """YaRN beyond the trained length, the original rotation and attention up to it."""

    def scales_attention(self) -> bool:
        return self.cos_sin_factor() != 1


@register_method("mixed-abf", paper="mixed windows, arXiv:2502.20082", training="needed")
@dataclass(frozen=True, kw_only=True)
class MixedABF(Mixed, ABF):
    """A larger base beyond the trained length, the original one up to it."""


@register_method(
    "mixed-longrope", paper="mixed windows, arXiv:2502.20082", training="not needed, but helps"
)
@dataclass(frozen=True, kw_only=True)
class MixedLongRoPE(Mixed, LongRoPE):
    """LongRoPE's long factors beyond the trained length, the original rotation up to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.short_factor is not None:
            raise Refused(
                "short_factor must be left out, got numbers: mixed-longrope keeps the original "
                "rotation up to the trained length; use longrope for another one"
            )

    def scales_attention(self) -> bool:
        return self.attention_factor != 1 and (self.attention_factor is not None or self.factor > 1)
