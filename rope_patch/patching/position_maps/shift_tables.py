"""Turn rotated queries and keys by the shifts of a region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from rope_patch.ops import pack_frequencies, rope, use_triton
from rope_patch.ops.modes import copy_to_device
from rope_patch.ops.reference import rotate

# Kernels take whole positions. Shifts that are not whole are counted in parts of a token: rounding
# to 2^-20 tokens moves an angle by half a millionth of a radian at most.
_FRACTION_BITS = 20


def count_shift(*shifts: torch.Tensor) -> int:
    """Return the bits behind a token's point that shifts are counted in: none if all are whole."""
    return 0 if all(bool((x == x.floor()).all()) for x in shifts) else _FRACTION_BITS


class ShiftPositions(NamedTuple):
    """Shifts as our kernels take them; see `rope_patch.ops.rope`."""

    positions: torch.Tensor
    packed_freqs: torch.Tensor
    sections: torch.Tensor | None


CosSin: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
ShiftTables: TypeAlias = "CosSin | ShiftPositions"


@dataclass(frozen=True, eq=False)
class ShiftRotation:
    """The rotation of one layer type, applied again by a shift of the position.

    A rotation by p followed by one by s is the rotation by p + s. An attention factor in cos and
    sin is in the tensor already, and stays.

    Attributes:
        inv_freq: Radians per token as the model rotates, float64, `[P]`; negative for models that
            rotate backward.
        interleaved: See `rope_patch.ops.rope`.
        kernels: See `rope_patch.patch`.
    """

    inv_freq: torch.Tensor
    interleaved: bool
    kernels: str = "hf"
    _packed: dict[tuple[int, torch.device], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    def tables(self, shift: torch.Tensor, x: torch.Tensor) -> ShiftTables:
        """Return what turns tensors like `x`: positions for our kernels, else cos and sin.

        Args:
            shift: Tokens, `[B, S]`, or `[B, S, N]` with one for each of N equal parts of the pairs.
            x: What will be turned.

        Returns:
            `ShiftPositions`, or two tensors `[B, 1, S, P]`, wide enough for `x`.
        """
        if self.uses_kernels(x):
            return self._positions(shift, x.device)
        shift = shift.to(x.device)
        inv_freq = self.inv_freq.to(shift.device)
        parts = shift if shift.ndim == 3 else shift[..., None]
        pairs = parts.repeat_interleave(len(inv_freq) // parts.shape[-1], -1)
        angle = pairs * inv_freq
        wide = torch.promote_types(x.dtype, torch.float32)
        return angle.cos().to(wide)[:, None], angle.sin().to(wide)[:, None]

    def uses_kernels(self, x: torch.Tensor) -> bool:
        """Return whether tensors like `x` are turned by Triton.

        Raises:
            ValueError: `kernels` is "triton", which cannot run.
        """
        return use_triton(x, self.kernels)

    def turn(self, x: torch.Tensor, tables: ShiftTables) -> torch.Tensor:
        """Return `x`, `[B, H, S, D]`, turned by the shifts of `tables`."""
        if isinstance(tables, ShiftPositions):
            return self._rope(x, tables, inplace=False)
        return rotate(x, *tables, interleaved=self.interleaved)

    def turn_(self, x: torch.Tensor, tables: ShiftPositions) -> None:
        """Turn `x` in its own memory."""
        self._rope(x, tables, inplace=True)

    def turn_alike(self, x: torch.Tensor, tables: ShiftPositions) -> torch.Tensor:
        """Return one token of each row, turned by several shifts in one launch.

        Args:
            x: `[B, H, 1, D]`; all rows are turned alike.
            tables: Of shifts `[N, 1]`.

        Returns:
            `[N, B, H, 1, D]`.
        """
        rows = x.reshape(1, -1, 1, x.shape[-1]).expand(tables.positions.shape[-2], -1, -1, -1)
        return self._rope(rows, tables, inplace=False).view(-1, *x.shape)

    def _rope(self, x: torch.Tensor, tables: ShiftPositions, *, inplace: bool) -> torch.Tensor:
        turned, _ = rope(
            x,
            None,
            tables.positions,
            tables.packed_freqs,
            sections=tables.sections,
            interleaved=self.interleaved,
            heads_dim=1,
            inplace=inplace,
            kernels=self.kernels,
        )
        return turned

    def _positions(self, shift: torch.Tensor, device: torch.device) -> ShiftPositions:
        bits = count_shift(shift)
        positions = (shift * 2**bits).round().to(torch.int64)
        sections = None
        if shift.ndim == 3:
            positions = positions.movedim(-1, 0).contiguous()
            pairs = torch.arange(len(self.inv_freq), device=device)
            sections = pairs // (len(self.inv_freq) // shift.shape[-1])
        if positions.device.type == "cpu":
            positions = copy_to_device(positions, device)
        return ShiftPositions(positions.to(device), self.packed_freqs(bits, device), sections)

    def packed_freqs(self, bits: int, device: torch.device) -> torch.Tensor:
        """Return the frequencies of 2^-bits tokens; they are float32, which the power keeps."""
        if (bits, device) not in self._packed:
            with torch.inference_mode(False):  # later forwards may run outside it
                packed = pack_frequencies(self.inv_freq / 2**bits)
                self._packed[bits, device] = packed.to(device)
        return self._packed[bits, device]
