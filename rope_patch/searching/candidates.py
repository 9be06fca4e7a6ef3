"""What a search proposes: a method with its options, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import build


@dataclass(frozen=True)
class SearchSpace:
    """What is searched: stretches for one rotation, for one target.

    Attributes:
        geometry: The rotation of the layers that are extended, as it is now.
        factor: Target length / trained length.
    """

    geometry: Geometry
    factor: float

    @property
    def pairs(self) -> int:
        """Rotated pairs, R / 2."""
        return self.geometry.rotary_dim // 2

    @property
    def length(self) -> int:
        """Target length in tokens."""
        return round(self.factor * self.geometry.trained_length)


@dataclass(frozen=True)
class Candidate:
    """One rotation to try.

    Attributes:
        origin: What proposed it, in a word or two, for the history: "yarn", "mutation", ...
        method: A method's name, as `rope_patch.patch` takes it.
        options: Its options, without the factor.
    """

    origin: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)

    def stretch(self, space: SearchSpace) -> list[float]:
        """By how much each pair is slowed down, `[R / 2]`; infinite where it is stopped."""
        found, base = self._frequencies(space).inv_freq, space.geometry.inv_freq()
        return torch.where(found == base, 1.0, base / found).tolist()  # pairs that stand still, too

    def attention_factor(self, space: SearchSpace) -> float:
        """The multiplier of cos and sin."""
        return float(self._frequencies(space).attention_factor)

    def _frequencies(self, space: SearchSpace) -> Any:
        method = build(self.method, factor=space.factor, **self.options)
        return method.frequencies(space.geometry)
