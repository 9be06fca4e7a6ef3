"""Learned tables of positions, read at more rows than they were trained with."""

from __future__ import annotations

import torch

from rope_patch.utils.errors import Refused

STRETCHES = ("linear", "cubic", "tile")


def stretch_table(table: torch.Tensor, rows: int, how: str = "linear") -> torch.Tensor:
    """Return a table of more rows made from a trained one.

    Args:
        table: `[L, D]`, the trained rows alone.
        rows: Rows of the result, at least L.
        how: "linear" reads row m at m L / rows between its neighbours, as position interpolation
            does: with a whole factor every trained row is there, bit for bit. "cubic" is torch's
            bicubic interpolation along positions. "tile" repeats the rows, as Longformer begins.

    Returns:
        `[rows, D]` in the table's dtype, computed in float64.

    Raises:
        ValueError: The name is unknown, or there are fewer rows than in the table.
    """
    if how not in STRETCHES:
        raise Refused(f"a table stretches by one of {', '.join(STRETCHES)}, got {how!r}")
    length, width = table.shape
    if rows < length:
        raise Refused(f"expected at least the {length:,} trained rows, got {rows:,}")
    if how == "tile":
        return table[torch.arange(rows, device=table.device) % length]
    wide = table.double()
    if how == "cubic":
        stretched = torch.nn.functional.interpolate(
            wide[None, None], size=(rows, width), mode="bicubic", align_corners=False
        )[0, 0]
        return stretched.to(table.dtype)
    # Whole numbers first, so that multiples of the factor are exact.
    positions = torch.arange(rows, device=table.device) * length
    low = positions // rows
    part = ((positions % rows).double() / rows)[:, None]
    high = (low + 1).clamp(max=length - 1)
    return torch.lerp(wide[low], wide[high], part).to(table.dtype)
