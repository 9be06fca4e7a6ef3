"""Geometry: the rotation of one layer type before an extension, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch  # takes seconds, so it is imported where numbers are computed

_WHOLE_HEAD = -1  # the default of `rotary_dim`: all of a head is rotated


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The rotation of one layer type, before any extension.

    Attributes:
        head_dim: Size of one attention head (D).
        theta: Rope base.
        trained_length: Context length in pretraining, in tokens.
        rotary_dim: Dimensions of each head that rotate (R); `head_dim` by default.
        layer_type: The layer type, if the model has several; else None.
        base: Radians per token of every pair, if an extension starts from other frequencies than
            theta^(-2i / R): those of the config's own scaling, which the model was trained with.
        attention_factor: Multiplier of cos and sin in the config's own scaling.
    """

    head_dim: int
    theta: float
    trained_length: int
    rotary_dim: int = _WHOLE_HEAD
    layer_type: str | None = None
    base: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.rotary_dim == _WHOLE_HEAD:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.head_dim < 2 or self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise Refused(
                f"rotary_dim must be even and between 2 and head_dim, got rotary_dim="
                f"{self.rotary_dim} with head_dim={self.head_dim}"
            )
        if not self.theta > 1:
            raise Refused(f"theta (the rope base) must be above 1, got {self.theta}")
        if self.trained_length < 1:
            raise Refused(f"trained_length must be a token count, got {self.trained_length}")
        if self.base and len(self.base) != self.rotary_dim // 2:
            raise Refused(
                f"base must have one number for each of the {self.rotary_dim // 2} rotated pairs, "
                f"got {len(self.base)}"
            )

    def inv_freq(self, theta: float | None = None) -> torch.Tensor:
        """Return the frequencies to extend: theta^(-2i / R) (RoFormer, arXiv:2104.09864).

        Args:
            theta: Rope base to use instead of the geometry's. If the geometry has `base`, each of
                its pairs is scaled by the ratio this base makes on the unscaled pair.

        Returns:
            Radians per token, float64, `[R / 2]`.
        """
        if not self.base:
            return self.unscaled_inv_freq(theta)
        import torch

        inv_freq = torch.tensor(self.base, dtype=torch.float64, device="cpu")
        return (
            inv_freq
            if theta is None
            else inv_freq * (self.unscaled_inv_freq(theta) / self.unscaled_inv_freq())
        )

    def unscaled_inv_freq(self, theta: float | None = None) -> torch.Tensor:
        """Return theta^(-2i / R), ignoring `base`; float64, `[R / 2]`."""
        import torch

        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
        return (self.theta if theta is None else theta) ** (-pair / self.rotary_dim)

    def pair_with_rotations(self, rotations: float) -> float:
        """Return the fractional index of the pair with this many rotations in the trained length.

        Wavelengths are interpolated between pairs, and extrapolated beyond the first and the last,
        as powers, like unscaled ones (the YaRN authors' `find_correction_dim`).
        """
        step = 2 * math.log(self.theta) / self.rotary_dim
        target = math.log(2 * math.pi * rotations / self.trained_length)
        if not self.base:
            return -target / step
        import torch

        logs = torch.tensor([f for f in self.base if f > 0], dtype=torch.float64).log()
        logs = logs.cummin(0).values  # searched stretches may be out of order
        if not len(logs) or target >= logs[0]:
            return (float(logs[0]) - target) / step if len(logs) else 0.0
        if target < logs[-1]:
            return len(logs) - 1 + (float(logs[-1]) - target) / step
        before = int((logs >= target).sum()) - 1
        if before == len(logs) - 1:
            return float(before)
        here, after = float(logs[before]), float(logs[before + 1])
        return before + (here - target) / (here - after)
