"""Frequencies that a saved folder records, of a method that is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method, option
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method("recorded", paper="the method that was saved", training="as the saved method")
@dataclass(frozen=True, kw_only=True)
class Recorded(Method):
    """Recorded frequencies of one model, the same at every length."""

    saved_method: str = option("name of the method that computed them")
    origin: str = option("where that method was from")
    layers: Mapping[str, Any] = option(
        "inv_freq, R / 2 numbers, and attention_factor of each layer type, `all` for all layers"
    )
    start_tokens: int = option("first positions that keep the unextended rotation", default=0)

    @property
    def start_token_count(self) -> int:
        return self.start_tokens

    @property
    def has_config_form(self) -> bool:
        return not self.start_tokens

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        import torch

        entry = self.layers.get(geometry.layer_type or "all")
        if entry is None or len(entry["inv_freq"]) != geometry.rotary_dim // 2:
            got = 0 if entry is None else len(entry["inv_freq"])
            where = geometry.layer_type or "all layers"
            raise Refused(
                f"the recorded frequencies of {self.saved_method!r} are for another model: "
                f"expected {geometry.rotary_dim // 2} pairs in {where}, got {got}"
            )
        inv_freq = torch.tensor(entry["inv_freq"], dtype=torch.float64, device="cpu")
        return Frequencies(inv_freq, float(entry["attention_factor"]))

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return `longrope`, or the unscaled rotation with start tokens, which no config has."""
        if not self.has_config_form:
            return {"rope_type": "default", "rope_theta": geometry.theta}
        return super().rope_parameters(geometry)

    def __str__(self) -> str:
        return f"{self.saved_method} (recorded) ×{self.factor:g}"
