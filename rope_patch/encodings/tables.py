"""Compute tables of positions that are added to embeddings: counted, sinusoidal, learned.

Sinusoids are those of Attention Is All You Need (arXiv:1706.03762, section 3.5).
"""

from __future__ import annotations

import math

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


LAWS = ("vaswani", "tensor2tensor")
LAYOUTS = ("interleaved", "halves")


def sinusoidal_frequencies(
    width: int,
    base: float = 10000.0,
    law: str = "vaswani",
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the angle a position adds, of each pair of components, `[width // 2]` float64.

    Args:
        width: Components.
        base: Theta; the slowest wavelength is about 2 pi times it.
        law: "vaswani" is the paper's base ** (-2k / width); "tensor2tensor" ends at exactly
            1 / base (XGLM, M2M-100, Speech2Text, Whisper).
        device: Where to compute them; torch's default unless given.
    """
    pairs = width // 2
    if law not in LAWS:
        raise Refused(f"law must be one of {', '.join(LAWS)}, got {law!r}")
    k = torch.arange(pairs, dtype=torch.float64, device=device)
    exponents = 2 * k / width if law == "vaswani" else k / max(pairs - 1, 1)
    return torch.exp(-math.log(base) * exponents)


def sinusoidal_table(
    positions: torch.Tensor,
    width: int,
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    law: str = "vaswani",
) -> torch.Tensor:
    """Return sines and cosines of each position's angles, `[N, width]` float64.

    Args:
        positions: `[N]`; fractions interpolate.
        width: Components; of an odd width the last one is 0.
        base: Theta.
        layout: "interleaved" is the paper's sin, cos, sin, cos; "halves" has all sines first.
        law: See `sinusoidal_frequencies`.
    """
    if layout not in LAYOUTS:
        raise Refused(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    frequencies = sinusoidal_frequencies(width, base, law, positions.device)
    angles = positions.double()[:, None] * frequencies
    waves = (angles.sin(), angles.cos())
    table = torch.cat(waves, 1) if layout == "halves" else torch.stack(waves, 2).flatten(1)
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))


def ntk_base(base: float, factor: float, width: int, law: str = "vaswani") -> float:
    """Return the base by which the slowest wavelength grows by a factor and the fastest stays.

    Args:
        base: The base before.
        factor: Target length / trained length.
        width: Components, more than 2.
        law: See `sinusoidal_frequencies`.
    """
    return base * factor ** (width / (width - 2) if law == "vaswani" else 1.0)


def shift_matrix(offset: float, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return the matrix that moves every position's encoding by an offset, `[width, width]`.

    The interleaved encoding of t + offset is this matrix times that of t, whatever t is.
    """
    angles = offset * sinusoidal_frequencies(width, base)
    blocks = torch.stack([angles.cos(), angles.sin(), -angles.sin(), angles.cos()], dim=1)
    return torch.block_diag(*blocks.view(-1, 2, 2))


def dot_products(distances: torch.Tensor, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return the product of two encodings at each distance, which is all it depends on, `[N]`."""
    frequencies = sinusoidal_frequencies(width, base, device=distances.device)
    return (distances.double()[:, None] * frequencies).cos().sum(1)


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


def logit_terms(
    content: torch.Tensor, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the four terms of the logits of embeddings to which positions were added.

    (x + p) W_q W_k^T (x + p)^T is the sum of content with content, content with position, position
    with content, and position with position, of query and key in this order (TENER,
    arXiv:1911.04474; Transformer-XL, arXiv:1901.02860, section 3.3). Not divided by sqrt(D).

    Args:
        content: Embeddings x, `[N, D]`.
        positions: Encodings p, `[N, D]`.
        query: W_q, `[D, H]`; queries are x W_q.
        key: W_k, `[D, H]`.

    Returns:
        Each term, `[N, N]`, queries in rows.
    """
    parts = {"content": content, "position": positions}
    return {
        f"{asking}-{asked}": (parts[asking] @ query) @ (parts[asked] @ key).T
        for asking in parts
        for asked in parts
    }
