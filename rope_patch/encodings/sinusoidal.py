"""Sinusoidal encodings (Attention Is All You Need, arXiv:1706.03762, section 3.5)."""

from __future__ import annotations

import math

import torch

from rope_patch.utils.errors import Refused

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
