"""LongRoPE (Ding et al. 2024, arXiv:2402.13753): one searched stretch for every pair.

Sequences up to the trained length use the short factors, longer ones the long factors. cos and sin
are multiplied by sqrt(1 + ln(factor) / ln(trained_length)) for both.

The first `start_tokens` positions can keep the rotation from before the extension, with its
attention factor instead of this one, as in the authors' code (MixedLongRoPEScaledRotaryEmbedding of
github.com/microsoft/LongRoPE, which restores the original module's cos and sin there). They keep it
in short sequences, too, so these keys have one rotation and are never re-rotated. `frequencies` are
those of all other positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import (
    Frequencies,
    Method,
    option,
    original_rope_parameters,
    require_number,
)
from rope_patch.methods.registry import register_method
from rope_patch.utils.errors import Refused


@register_method("longrope", paper="LongRoPE, arXiv:2402.13753", training="not needed, but helps")
@dataclass(frozen=True, kw_only=True)
class LongRoPE(Method):
    """LongRoPE with given factors: each pair stretched by its own searched number."""

    long_factor: Sequence[float] = option(
        "stretch of each pair beyond the trained length, R / 2 numbers; `rope-patch search` finds "
        "them for a model, rope_patch.searching.read_factors reads published ones"
    )
    short_factor: Sequence[float] | None = option(
        "stretch of each pair up to the trained length; none unless given", default=None
    )
    attention_factor: float | None = option(
        "multiplier of cos and sin; sqrt(1 + ln(factor) / ln(trained_length)) unless given",
        default=None,
    )
    start_tokens: int = option(
        "the first so many positions keep the rotation from before the extension", default=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("long_factor", "short_factor"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_factors(name, value))
        if self.attention_factor is not None:
            require_number("attention_factor", self.attention_factor)
            if self.attention_factor <= 0:
                raise Refused(f"attention_factor must be above 0, got {self.attention_factor}")
        require_number("start_tokens", self.start_tokens)
        if self.start_tokens < 0 or self.start_tokens != int(self.start_tokens):
            raise Refused(
                f"start_tokens must be a whole number of tokens, 0 for none, got "
                f"{self.start_tokens!r}"
            )
        object.__setattr__(self, "start_tokens", int(self.start_tokens))

    @property
    def has_config_form(self) -> bool:
        return not self.start_tokens

    @property
    def start_token_count(self) -> int:
        return self.start_tokens

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        import torch

        is_long = seq_len is None or seq_len > geometry.trained_length
        stretch = self._checked_factors("long_factor" if is_long else "short_factor", geometry)
        return Frequencies(
            geometry.inv_freq() / torch.tensor(stretch, dtype=torch.float64, device="cpu"),
            self._cos_sin_factor(geometry),
        )

    def valid_until(self, length: float, trained_length: int) -> float:
        short = self.short_factor or (1.0,) * len(self.long_factor)
        is_long = length > trained_length or short == self.long_factor
        return math.inf if is_long else float(trained_length)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return `longrope`, or the unscaled rotation with start tokens, which no config has."""
        if not self.has_config_form:
            return {"rope_type": "default", "rope_theta": geometry.theta}
        return {
            "rope_type": "longrope",
            "factor": float(self.factor),
            "long_factor": list(self._checked_factors("long_factor", geometry)),
            "short_factor": list(self._checked_factors("short_factor", geometry)),
            "attention_factor": self._cos_sin_factor(geometry),
            **original_rope_parameters(geometry),
        }

    def _checked_factors(self, name: str, geometry: Geometry) -> Sequence[float]:
        pairs = geometry.rotary_dim // 2
        stretch = getattr(self, name)
        if stretch is None:
            return (1.0,) * pairs
        if len(stretch) != pairs:
            raise Refused(
                f"{name} must have one number for each of the {pairs} rotated pairs, got "
                f"{len(stretch)}"
            )
        return stretch

    def _cos_sin_factor(self, geometry: Geometry) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(geometry.trained_length))


def _as_factors(name: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of numbers, got {value!r}")
    for number in value:
        require_number(name, number)
        if number <= 0:
            raise Refused(f"{name} must hold numbers above 0, got {number}")
    return tuple(float(number) for number in value)
