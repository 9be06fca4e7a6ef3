"""Positions as numbers: counted, divided by a length, or written in digits."""

from __future__ import annotations

import torch

from rope_patch.utils.errors import Refused


def integer_table(positions: torch.Tensor, width: int, scale: float = 1.0) -> torch.Tensor:
    """Return the position times a scale in every component, `[N, width]` float64.

    Args:
        positions: `[N]`.
        width: Components.
        scale: Factor; at 1 positions drown embeddings of standard deviation 0.02.
    """
    return (positions.double() * scale)[:, None].expand(-1, width).clone()


def normalised_table(positions: torch.Tensor, width: int, length: int) -> torch.Tensor:
    """Return the position divided by a length in every component, `[N, width]` float64.

    The length must stay: with that of each sequence, the same position has another code in a
    longer text, and a causal model is told how long the text will be.
    """
    return integer_table(positions, width, 1 / length)


def digit_count(positions: int, base: int = 2) -> int:
    """Return how many digits tell so many positions apart, at least 1."""
    count, reach = 1, base
    while reach < positions:
        count, reach = count + 1, reach * base
    return count


def digit_table(
    positions: torch.Tensor,
    width: int,
    *,
    count: int | None = None,
    base: int = 2,
    signed: bool = False,
    largest_first: bool = False,
    repeat: bool = False,
) -> torch.Tensor:
    """Return the digits of positions, one a component, between 0 and 1.

    Args:
        positions: Whole numbers, `[N]`.
        width: Components.
        count: Digits; all components unless given. Positions repeat after base ** count.
        base: Of the number system; 2 gives bits.
        signed: Whether digits are between -1 and 1.
        largest_first: Whether the first component is the digit that changes most rarely.
        repeat: Whether neighbouring components repeat a digit, to fill the width.

    Returns:
        `[N, width]` float64; components beyond the digits are 0.

    Raises:
        ValueError: There are more digits than components.
    """
    count = width if count is None else count
    if count > width:
        raise Refused(f"{count} digits need as many components, got a width of {width}")
    digits, rest = [], positions.long()
    for _ in range(count):
        digits.append(rest % base)
        rest = rest // base
    table = torch.stack(digits[::-1] if largest_first else digits, dim=1).double() / (base - 1)
    table = 2 * table - 1 if signed else table
    if repeat:
        table = table.repeat_interleave(width // count, dim=1)
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
