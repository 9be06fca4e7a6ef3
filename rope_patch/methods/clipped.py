"""CoPE (arXiv:2602.05258): the slowest pairs are clipped softly instead of stretched.

The last n of P pairs are multiplied by (1 + cos(pi k / (n - 1))) / 2 for k = 0 ... n - 1, so the
slowest one stands still and the fastest of the n is unchanged. The authors' code clips 20 of 64
pairs. `Clipped` turns any method into a clipped one: put it first among the bases, as the classes
below do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rope_patch.geometry import Geometry
from rope_patch.methods.abf import ABF
from rope_patch.methods.base import Frequencies, Method, option, require_number
from rope_patch.methods.default import Default
from rope_patch.methods.registry import register_method
from rope_patch.methods.yarn import YaRN
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch

_CLIPPED_SHARE = 20 / 64  # share of the pairs that are clipped, from the authors' code


@dataclass(frozen=True, kw_only=True)
class Clipped(Method):
    """Mixin that clips the slowest pairs of the next base class."""

    clipped_pairs: int | None = option(
        "how many of the slowest pairs are clipped; 20 of each 64 unless given", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clipped_pairs is None:
            return
        require_number("clipped_pairs", self.clipped_pairs)
        if self.clipped_pairs < 2 or self.clipped_pairs != int(self.clipped_pairs):
            raise Refused(
                "clipped_pairs must be a whole number of at least 2 (the first of them is "
                f"unchanged, the last stands still), got {self.clipped_pairs!r}"
            )

    def clip(self, geometry: Geometry) -> torch.Tensor:
        """Return each pair's multiplier, float64, `[R / 2]`: from 1 down to 0.

        Raises:
            ValueError: More pairs are to be clipped than rotate.
        """
        import torch

        pairs = geometry.rotary_dim // 2
        count = self.clipped_pairs
        if count is None:
            count = min(max(round(_CLIPPED_SHARE * pairs), 2), pairs)
        if count > pairs:
            raise Refused(
                f"clipped_pairs must be at most {pairs}, the pairs that rotate, got {count}"
            )
        clip = torch.ones(pairs, dtype=torch.float64, device="cpu")
        if count > 1:  # a single rotating pair stays as it is
            steps = torch.arange(count, dtype=torch.float64, device="cpu")
            clip[pairs - count :] = (1 + torch.cos(steps * (math.pi / (count - 1)))) / 2
            clip[-1] = 0.0
        return clip

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        inner = super().frequencies(geometry, seq_len)  # type: ignore[safe-super]
        return Frequencies(inner.inv_freq * self.clip(geometry), inner.attention_factor)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return `longrope` with explicit factors, whatever form the inner method has."""
        return Method.rope_parameters(self, geometry)


@register_method("clipped", paper="CoPE, arXiv:2602.05258", training="needed")
@dataclass(frozen=True, kw_only=True)
class ClippedDefault(Clipped, Default):
    """CoPE: the slowest pairs are slowed down to a standstill, the others kept."""


@register_method("clipped-abf", paper="CoPE, arXiv:2602.05258", training="needed")
@dataclass(frozen=True, kw_only=True)
class ClippedABF(Clipped, ABF):
    """CoPE as its authors train it: a larger theta, and the slowest pairs clipped."""


@register_method("clipped-yarn", paper="CoPE, arXiv:2602.05258", training="not needed, but helps")
@dataclass(frozen=True, kw_only=True)
class ClippedYaRN(Clipped, YaRN):
    """YaRN, and its slowest pairs clipped as in CoPE."""
