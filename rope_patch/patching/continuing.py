"""A method that starts where a config's own, trained-in scaling ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import origin
from rope_patch.methods.linear import Linear
from rope_patch.methods.mixed import Mixed
from rope_patch.methods.nope import NoPE


@dataclass(frozen=True, kw_only=True)
class Continued(Method):
    """Stretches what a model runs with, instead of the unscaled rotation.

    The geometry brings the frequencies and the attention factor to start from. A model that has two
    sets of its own (LongRoPE) keeps the short one for short sequences.

    Attributes:
        inner: The method that is asked for.
        scaling: The config's own scaling.
        standing: Its `rope_parameters`.
        short: The frequencies that the model has for short sequences, `[R / 2]`, where they are
            others than the geometry's.
        short_length: Up to how many tokens.
        sharpens: Whether `inner` has an attention factor of its own at the target.
        stops: Whether some pair does not rotate there.
    """

    inner: Method
    scaling: str
    standing: dict[str, Any]
    short: tuple[float, ...] = ()
    short_length: int = 0
    sharpens: bool = False
    stops: bool = False

    def __post_init__(self) -> None:
        # What describes a method's class describes this one, too.
        for name in ("name", "paper", "training", "grows", "factor_in_formula", "factor"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @classmethod
    def of(cls, inner: Method, geometry: Geometry, standing: dict[str, Any]) -> Continued:
        """Puts a method on a geometry that was started from a model's own scaling.

        Args:
            inner: The method.
            geometry: Where it starts, of any of the layer types.
            standing: The config's `rope_parameters` for it.
        """
        short: tuple[float, ...] = ()
        short_length = 0
        scaling = standing.get("rope_type") or standing["type"]
        if scaling == "longrope" and standing["short_factor"] != standing["long_factor"]:
            stretch = torch.tensor(standing["short_factor"], dtype=torch.float64, device="cpu")
            short = tuple((geometry.unscaled() / stretch).tolist())
            short_length = int(standing["original_max_position_embeddings"])
        reached = inner.frequencies(geometry)
        return cls(
            inner=inner,
            scaling=scaling,
            standing=standing,
            short=short,
            short_length=short_length,
            sharpens=reached.attention_factor != 1,
            stops=bool((reached.inv_freq == 0).any()),
        )

    @property
    def native(self) -> bool:
        if isinstance(self.inner, NoPE):
            return self.inner.native
        if not self.inner.native or self.inner.grows:
            return False
        if self.stops:
            return self._proportional
        if isinstance(self.inner, Mixed):  # three sets of frequencies are more than a config has
            return not self.short
        return not (self.short and self.sharpens)

    @property
    def _proportional(self) -> bool:
        return self.scaling == "proportional" and isinstance(self.inner, Linear)

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        if not geometry.base:
            return self.inner.frequencies(geometry, seq_len)
        if self.short and seq_len is not None and seq_len <= self.short_length:
            inv_freq = torch.tensor(self.short, dtype=torch.float64, device="cpu")
            return Frequencies(inv_freq, geometry.attention_factor)
        changed = self.inner.frequencies(geometry, seq_len)
        return Frequencies(changed.inv_freq, changed.attention_factor * geometry.attention_factor)

    def reach(self, length: float, trained_length: int) -> float:
        if length <= self.short_length:
            return float(self.short_length)
        return self.inner.reach(length, trained_length)

    def at(self, geometry: Geometry, length: float) -> Frequencies:
        reach = self.reach(length, geometry.trained_length)
        return self.frequencies(geometry, None if math.isinf(reach) else reach)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """`longrope` with the stretch of both scalings; what stood there, where that cannot be."""
        if not geometry.base:  # a layer type that no scaling was trained into
            return self.inner.rope_parameters(geometry)
        if not self.native:
            return dict(self.standing)
        if isinstance(self.inner, NoPE):
            return self.inner.rope_parameters(geometry)
        if self._proportional:
            factor = float(self.standing.get("factor") or 1.0) * self.inner.factor
            return {**self.standing, "factor": factor}
        reached = self.frequencies(geometry)
        short = reached.inv_freq
        if self.short or isinstance(self.inner, Mixed):
            short = self.frequencies(
                geometry, self.short_length or geometry.trained_length
            ).inv_freq
        return {
            "rope_type": "longrope",
            "factor": float(self.factor),
            "long_factor": (geometry.unscaled() / reached.inv_freq).tolist(),
            "short_factor": (geometry.unscaled() / short).tolist(),
            "attention_factor": float(reached.attention_factor),
            **origin(geometry),
            **({"original_max_position_embeddings": self.short_length} if self.short else {}),
        }

    def options(self) -> dict[str, Any]:
        return self.inner.options()

    def __str__(self) -> str:
        return f"{self.inner} on the config's own {self.scaling}"
