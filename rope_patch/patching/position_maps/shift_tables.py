"""Turn rotated queries and keys by the shifts of a region."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_patch.ops.reference import rotate


@dataclass(frozen=True, eq=False)
class ShiftRotation:
    """The rotation of one layer type, applied again by a shift of the position.

    A rotation by p followed by one by s is the rotation by p + s. An attention factor in cos and
    sin is in the tensor already, and stays.

    Attributes:
        inv_freq: Radians per token as the model rotates, float64, `[P]`; negative for models that
            rotate backward.
        interleaved: See `rope_patch.ops.rope`.
    """

    inv_freq: torch.Tensor
    interleaved: bool

    def tables(self, shift: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of shifts, wide enough for `x`.

        Args:
            shift: Tokens, `[B, S]`, or `[B, S, N]` with one for each of N equal parts of the pairs.
            x: What will be turned.

        Returns:
            Two tensors `[B, 1, S, P]`.
        """
        inv_freq = self.inv_freq.to(shift.device)
        parts = shift if shift.ndim == 3 else shift[..., None]
        pairs = parts.repeat_interleave(len(inv_freq) // parts.shape[-1], -1)
        angle = pairs * inv_freq
        wide = torch.promote_types(x.dtype, torch.float32)
        return angle.cos().to(wide)[:, None], angle.sin().to(wide)[:, None]

    def turn(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return `x`, `[B, H, S, D]`, turned by the shifts of `tables`."""
        return rotate(x, *tables, interleaved=self.interleaved)
