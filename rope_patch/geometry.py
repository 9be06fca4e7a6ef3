"""Geometry: one kind of layer's rotation before an extension, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # takes seconds, so it is imported where numbers are computed


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The rotation of one kind of layer, before any extension.

    Attributes:
        head_dim: Size of one attention head (D).
        theta: Rope base.
        trained_length: Tokens that the model saw at once in pretraining.
        rotary_dim: Dimensions of each head that rotate (R); `head_dim` unless given.
        layer_type: The kind of layer this holds for, where a model has several; else None.
        base: Radians per token of every pair, where an extension starts from others than
            theta^(-2i / R): from those that a config's own scaling made, and training knows.
        attention_factor: Multiplier of cos and sin that the start has already.
    """

    head_dim: int
    theta: float
    trained_length: int
    rotary_dim: int = 0
    layer_type: str | None = None
    base: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.head_dim < 2 or self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and between 2 and head_dim, got rotary_dim="
                f"{self.rotary_dim} with head_dim={self.head_dim}"
            )
        if not self.theta > 1:
            raise ValueError(f"theta (the rope base) must be above 1, got {self.theta}")
        if self.trained_length < 1:
            raise ValueError(f"trained_length must be a token count, got {self.trained_length}")
        if self.base and len(self.base) != self.rotary_dim // 2:
            raise ValueError(
                f"base must have one number for each of the {self.rotary_dim // 2} rotated pairs, "
                f"got {len(self.base)}"
            )

    def inv_freq(self, theta: float | None = None) -> torch.Tensor:
        """Frequencies to start from: theta^(-2i / R) for pair i (RoFormer, arXiv:2104.09864).

        Args:
            theta: Another base than the geometry's own; where the start is another, each pair is
                changed by as much as this would change an unscaled one.

        Returns:
            Radians per token, float64, `[R / 2]`.
        """
        if not self.base:
            return self.unscaled_inv_freq(theta)
        import torch

        start = torch.tensor(self.base, dtype=torch.float64, device="cpu")
        return (
            start
            if theta is None
            else start * (self.unscaled_inv_freq(theta) / self.unscaled_inv_freq())
        )

    def unscaled_inv_freq(self, theta: float | None = None) -> torch.Tensor:
        """theta^(-2i / R), whatever the start is; float64, `[R / 2]`."""
        import torch

        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
        return (self.theta if theta is None else theta) ** (-pair / self.rotary_dim)

    def pair_with_rotations(self, rotations: float) -> float:
        """Index, not rounded, of the pair that turns so many times within the trained length.

        Between pairs, and beyond the first and the last, wavelengths grow as powers, as unscaled
        ones do everywhere (the YaRN authors' `find_correction_dim`).
        """
        step = 2 * math.log(self.theta) / self.rotary_dim
        target = math.log(2 * math.pi * rotations / self.trained_length)
        if not self.base:
            return -target / step
        import torch

        logs = torch.tensor([f for f in self.base if f > 0], dtype=torch.float64).log()
        logs = logs.cummin(0).values  # searched stretches may leave neighbours out of order
        if not len(logs) or target >= logs[0]:
            return (float(logs[0]) - target) / step if len(logs) else 0.0
        if target < logs[-1]:
            return len(logs) - 1 + (float(logs[-1]) - target) / step
        before = int((logs >= target).sum()) - 1
        if before == len(logs) - 1:
            return float(before)
        here, after = float(logs[before]), float(logs[before + 1])
        return before + (here - target) / (here - after)
