"""The search space, and the candidates that strategies propose in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method, build
from rope_patch.methods.registry import get_method


@dataclass(frozen=True)
class SearchSpace:
    """Stretches of one rotation for one target length.

    Attributes:
        geometry: The present rotation of the layers that are extended.
        factor: Target length / trained length.
    """

    geometry: Geometry
    factor: float

    @property
    def pairs(self) -> int:
        """Return the number of rotated pairs, R / 2."""
        return self.geometry.rotary_dim // 2

    @property
    def length(self) -> int:
        """Return the target length in tokens."""
        return round(self.factor * self.geometry.trained_length)


@dataclass(frozen=True)
class Candidate:
    """One rotation to try.

    Attributes:
        origin: The step that proposed it, for the history: "yarn", "mutation", ...
        method: A method's name, as `rope_patch.patch` takes it.
        options: The method's options, without the factor.
    """

    origin: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_factor(self) -> bool:
        """Return whether the method has a factor; dynamic methods and maps need none."""
        return not get_method(self.method).is_dynamic

    def stretch(self, space: SearchSpace) -> list[float]:
        """Return old / new frequency of each pair, `[R / 2]`; infinite where a pair stops."""
        new, base = self._frequencies(space).inv_freq, space.geometry.inv_freq()
        return torch.where(new == base, 1.0, base / new).tolist()  # 0 / 0 would be NaN

    def attention_factor(self, space: SearchSpace) -> float:
        """Return the multiplier of cos and sin."""
        return float(self._frequencies(space).attention_factor)

    def rotation_key(self, space: SearchSpace, digits: int) -> tuple[object, ...]:
        """Return a key that is equal for candidates that no model can tell apart.

        Args:
            space: The space of the candidate.
            digits: Significant digits in which stretches and the attention factor must agree.
                Formulas that mean the same differ by rounding.

        Raises:
            ValueError: The method refuses the options.
            TypeError: The method has no such options.
        """
        # Digits, not `Frequencies.key`: what differs by rounding alone is measured once.
        numbers = [*self.stretch(space), self.attention_factor(space)]
        rounded = (f"{number:.{digits}g}" for number in numbers)
        method = self._build(space)
        changes = method.attention_changes(space.length, space.geometry.trained_length)
        others = [json.dumps(changes, sort_keys=True)] if changes else []
        return (*rounded, self.options.get("start_tokens", 0), *others)

    def _frequencies(self, space: SearchSpace) -> Frequencies:
        return self._build(space).frequencies(space.geometry)

    def _build(self, space: SearchSpace) -> Method:
        size = {"factor": space.factor} if self.takes_factor else {}
        return build(self.method, **size, **self.options)
