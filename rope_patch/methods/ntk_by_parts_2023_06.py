"""NTK-by-parts of June 2023, with two ramps, which models were fine-tuned with before YaRN.

As in the YaRN authors' repository (`LlamaPartNTKScaledRotaryEmbedding`). The paper's method of that
name is another one, with one ramp and no NTK term.
"""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.methods.ntk import NTK
from rope_patch.methods.ntk_by_parts import NTKByParts
from rope_patch.methods.registry import register_method


@register_method(
    "ntk-by-parts-2023-06",
    paper="NTK-by-parts of June 2023, github.com/jquesnelle/yarn",
    training="not needed, but helps",
)
@dataclass(frozen=True, kw_only=True)
class NTKByParts202306(Method):
    """NTK-by-parts before YaRN: slow pairs interpolated, middle ones as in NTK, fast ones kept."""

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        plain = geometry.inv_freq()
        to_linear = NTKByParts(beta_fast=1.25, beta_slow=0.75).ramp(geometry)
        from_plain = NTKByParts(beta_fast=16.0, beta_slow=2.0).ramp(geometry)
        ntk = NTK(factor=self.factor).frequencies(geometry).inv_freq
        scaled = ntk * (1 - to_linear) + plain / self.factor * to_linear
        return Frequencies(plain * (1 - from_plain) + scaled * from_plain)
