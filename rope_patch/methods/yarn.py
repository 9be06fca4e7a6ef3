"""YaRN (Peng et al. 2023, arXiv:2309.00071): NTK-by-parts with a warmer attention.

The ramp between interpolated and original frequencies is that of `ntk_by_parts`. cos and sin are
multiplied by 0.1 ln(factor) + 1 (section 3.4), so attention logits get its square.
"""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.methods.base import option, require_number
from rope_patch.methods.ntk_by_parts import NTKByParts, yarn_mscale
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method("yarn", paper="YaRN, arXiv:2309.00071", training="not needed, but helps")
@dataclass(frozen=True, kw_only=True)
class YaRN(NTKByParts):
    """YaRN: fast pairs kept, slow ones interpolated, attention sharpened by its factor."""

    attention_factor: float | None = option(
        "multiplier of cos and sin; 0.1 ln(factor) + 1 unless given", default=None
    )
    mscale: float | None = option(
        "with mscale_all_dim: attention_factor is the ratio of both laws (DeepSeek)", default=None
    )
    mscale_all_dim: float | None = option("see mscale", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None:
                require_number(name, value)
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise Refused(f"attention_factor must be above 0, got {self.attention_factor}")

    def cos_sin_factor(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:  # as in transformers, both must be nonzero
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor)
