"""Dynamic scaling: the factor follows the sequence (YaRN paper, arXiv:2309.00071, section 3.3).

A sequence of n tokens has the factor n / trained_length. Up to the trained length it keeps the
original rotation, so short context costs nothing. `Dynamic` turns any method into a dynamic one:
put it first among the bases, as the classes below do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rope_patch.geometry import Geometry
from rope_patch.methods.abf import ABF
from rope_patch.methods.base import Frequencies, option
from rope_patch.methods.growth import LengthGrowth
from rope_patch.methods.linear import Linear
from rope_patch.methods.llama3 import Llama3
from rope_patch.methods.ntk import NTK
from rope_patch.methods.ntk_by_parts import NTKByParts
from rope_patch.methods.ntk_by_parts_2023_06 import NTKByParts202306
from rope_patch.methods.registry import register_method
from rope_patch.methods.yarn import YaRN


@dataclass(frozen=True, kw_only=True)
class Dynamic(LengthGrowth):
    """Mixin that sets the factor of the next base class from the sequence length."""

    @property
    def has_config_form(self) -> bool:
        return False

    def factor_at(self, ratio: float) -> float:
        """Return the inner method's factor at `ratio` times the trained length; ratio > 1."""
        return ratio

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        ratio = self.factor if seq_len is None else seq_len / geometry.trained_length
        if ratio <= 1:
            return Frequencies(geometry.inv_freq())
        # The next base class, with the factor of this length.
        return super(Dynamic, replace(self, factor=self.factor_at(ratio))).frequencies(  # type: ignore[safe-super]
            geometry
        )

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return the unscaled rotation, which holds up to the trained length.

        No config can express the rest.
        """
        return {"rope_type": "default", "rope_theta": geometry.theta}

    def __str__(self) -> str:
        return self.name


@register_method(
    "dynamic", paper="Dynamic NTK, arXiv:2309.00071 section 3.3", training="not needed"
)
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Dynamic, NTK):
    """NTK-aware, the factor following the sequence; transformers' `dynamic`, with its factor."""

    factor_is_option: ClassVar[bool] = True

    factor: float = option(
        "transformers' factor: the stretch is factor * n / trained_length - (factor - 1)",
        default=1.0,
    )

    @property
    def has_config_form(self) -> bool:
        return True

    @property
    def is_native(self) -> bool:
        return super().is_native and self.growth == "exact"  # as transformers' own grows

    def factor_at(self, ratio: float) -> float:
        return self.factor * ratio - (self.factor - 1)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "dynamic",
            "rope_theta": geometry.theta,
            "factor": float(self.factor),
        }

    def __str__(self) -> str:
        return self.name if self.factor == 1 else f"{self.name}, factor {self.factor:g}"


@register_method(
    "dynamic-linear",
    paper="Dynamic position interpolation, arXiv:2309.00071 section 3.3",
    training="needed",
)
@dataclass(frozen=True, kw_only=True)
class DynamicLinear(Dynamic, Linear):
    """Position interpolation, the factor following the sequence."""


@register_method(
    "dynamic-ntk-by-parts",
    paper="NTK-by-parts, arXiv:2309.00071 sections 3.2 and 3.3",
    training="not needed",
)
@dataclass(frozen=True, kw_only=True)
class DynamicNTKByParts(Dynamic, NTKByParts):
    """NTK-by-parts, the factor following the sequence."""


@register_method(
    "dynamic-yarn", paper="Dynamic YaRN, arXiv:2309.00071 section 3.3", training="not needed"
)
@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(Dynamic, YaRN):
    """YaRN, the factor and with it the attention factor following the sequence."""


@register_method(
    "dynamic-llama3", paper="Llama 3.1's ramp, arXiv:2407.21783", training="not needed"
)
@dataclass(frozen=True, kw_only=True)
class DynamicLlama3(Dynamic, Llama3):
    """Llama 3.1's ramp, the factor following the sequence."""


@register_method("dynamic-abf", paper="critical base, arXiv:2310.05209", training="needed")
@dataclass(frozen=True, kw_only=True)
class DynamicABF(Dynamic, ABF):
    """A base that follows the sequence: the critical one of its length."""


@register_method(
    "dynamic-ntk-by-parts-2023-06",
    paper="NTK-by-parts of June 2023, github.com/jquesnelle/yarn",
    training="not needed",
)
@dataclass(frozen=True, kw_only=True)
class DynamicNTKByParts202306(Dynamic, NTKByParts202306):
    """NTK-by-parts before YaRN, the factor following the sequence."""
