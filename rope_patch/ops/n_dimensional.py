"""RoPE on several axes: the height and width of an image, or the time, height and width of a video.

A token has one coordinate on each of A axes, and each pair of components one frequency for each
axis. A pair's angle is the sum of coordinate times frequency. "Axial" frequencies have one axis a
pair (Pixtral, Qwen2-VL, Llama 4), "mixed" ones have all of them (RoPE-Mixed, arXiv:2403.13298).
Both keep what RoPE is used for: a product of query and key depends on the difference of their
coordinates alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rope_patch.ops.reference import rotate
from rope_patch.utils.errors import Refused

SPECTRA = ("own", "alternate")


def axial_frequencies(
    rotary_dim: int,
    axes: int,
    theta: float = 10000.0,
    *,
    pairs: Sequence[int] | None = None,
    spectrum: str = "own",
) -> torch.Tensor:
    """Return frequencies where each pair rotates by one axis, `[R / 2, A]` float64.

    The first pairs belong to axis 0, the next ones to axis 1, and so on.

    Args:
        rotary_dim: R, rotated components of a head.
        axes: A.
        theta: Rope base. Images have few tokens on an axis, so models for them use 10 to 10,000.
        pairs: How many pairs each axis has; equal shares unless given.
        spectrum: "own" gives each axis the frequencies of a RoPE of its share alone, so that equal
            shares have equal frequencies (Qwen2-VL's and Llama 4's images). "alternate" deals the
            frequencies of one RoPE of all components to the axes in turn (Pixtral).

    Raises:
        ValueError: The shares do not add up, or the name is unknown.
    """
    total = _pair_count(rotary_dim, axes)
    if spectrum not in SPECTRA:
        raise Refused(f"spectrum must be one of {', '.join(SPECTRA)}, got {spectrum!r}")
    if pairs is None:
        if total % axes:
            raise Refused(
                f"{total} pairs do not split into {axes} equal shares: name them, such as "
                f"pairs={_near_shares(total, axes)}"
            )
        pairs = [total // axes] * axes
    if len(pairs) != axes or sum(pairs) != total or min(pairs) < 1:
        raise Refused(
            f"pairs must be {axes} numbers above 0 that add up to {total}, got {list(pairs)}"
        )
    if spectrum == "alternate" and len(set(pairs)) > 1:
        raise Refused(f'spectrum="alternate" deals equal shares, got pairs={list(pairs)}')
    frequencies = torch.zeros(total, axes, dtype=torch.float64)
    start = 0
    for axis, share in enumerate(pairs):
        steps = torch.arange(share, dtype=torch.float64)
        exponents = (steps * axes + axis) / total if spectrum == "alternate" else steps / share
        frequencies[start : start + share, axis] = theta**-exponents
        start += share
    return frequencies


def mixed_frequencies(
    rotary_dim: int,
    axes: int,
    theta: float = 10.0,
    *,
    heads: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return frequencies where each pair rotates by all axes: RoPE-Mixed's initial values.

    The paper learns them from here on. Each head draws one set of A orthogonal directions. Each
    direction has an equal share of the pairs, with the magnitudes of `axial_frequencies`; without
    the drawn rotation these would be the axial frequencies.

    Args:
        rotary_dim: R, rotated components of a head; A must divide R / 2.
        axes: A.
        theta: Rope base; the paper's is 10.
        heads: H, heads with directions of their own, as in the paper; None draws one set for all.
        generator: Of the directions.

    Returns:
        `[R / 2, A]`, or `[H, R / 2, A]` with `heads`, float64.

    Raises:
        ValueError: The pairs do not split into equal shares.
    """
    axial = axial_frequencies(rotary_dim, axes, theta)
    count = 1 if heads is None else heads
    drawn = torch.randn(count, axes, axes, dtype=torch.float64, generator=generator)
    directions, triangle = torch.linalg.qr(drawn)
    # With positive diagonals the directions are uniform, and all of them rotations: det = 1.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    directions[..., -1] *= torch.linalg.det(directions).sign()[:, None]
    mixed = axial @ directions.mT
    return mixed[0] if heads is None else mixed


def n_dimensional_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return each pair's angle in radians, float64.

    Args:
        positions: Coordinates of tokens, `[..., S, A]`; fractions are allowed.
        frequencies: `[R / 2, A]` or `[H, R / 2, A]`.

    Returns:
        `[..., S, R / 2]`, or `[..., S, H, R / 2]` for frequencies of H heads.

    Raises:
        ValueError: The numbers of axes differ.
    """
    if frequencies.ndim not in (2, 3) or positions.shape[-1:] != frequencies.shape[-1:]:
        raise Refused(
            "expected positions [..., S, A] and frequencies [R / 2, A] or [H, R / 2, A], got "
            f"{list(positions.shape)} and {list(frequencies.shape)}"
        )
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64  # mps has no float64
    # Products are summed in one fixed order, axis by axis.
    shape = (*positions.shape[:-1], *[1] * (frequencies.ndim - 1), positions.shape[-1])
    return (positions.to(dtype).view(shape) * frequencies.to(positions.device, dtype)).sum(-1)


def n_dimensional_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 2,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys to coordinates on several axes; see `rope_patch.ops.n_dimensional`.

    Plain torch on every device, and differentiable by the frequencies, too. The angles are float64,
    and each result is rounded once.

    Args:
        q: Queries, `[B, S, H, D]`.
        k: Keys, `[B, S, K, D]`, if any.
        positions: `[S, A]` or `[B, S, A]`.
        frequencies: Radians per unit of each axis, `[R / 2, A]`, or `[H, R / 2, A]` for heads that
            differ; then there must be as many key heads.
        interleaved: Whether a pair is two neighbours, rather than the same index in both halves of
            the rotated components.
        heads_dim: Dimension of the heads: 2, or 1 for `[B, H, S, D]`.

    Returns:
        Both, rotated, in their dtypes. Components beyond the first R keep their values.

    Raises:
        ValueError: Shapes do not match.
    """
    if heads_dim not in (1, 2):
        raise Refused(f"heads_dim must be 1 ([B, H, S, D]) or 2 ([B, S, H, D]), got {heads_dim}")
    angles = n_dimensional_angles(positions, frequencies)
    angles = angles if frequencies.ndim == 3 else angles.unsqueeze(-2)
    angles = angles.movedim(-3, -2) if heads_dim == 1 else angles
    for name, x in (("q", q), ("k", k)):
        if x is not None:
            _validate(name, x, angles)
    cos, sin = angles.cos(), angles.sin()
    rotated = (None if x is None else rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return next(rotated), next(rotated)  # type: ignore[return-value]


def _validate(name: str, x: torch.Tensor, angles: torch.Tensor) -> None:
    """Raise if angles do not belong to these queries or keys."""
    pairs = angles.shape[-1]
    leading = angles.shape[:-1]
    fits = all(
        want in (1, have) for want, have in zip(leading[::-1], x.shape[-2::-1], strict=False)
    )
    if x.ndim != 4 or not fits or 2 * pairs > x.shape[-1]:
        raise Refused(
            f"{name} must have 4 dimensions that match angles {list(angles.shape)}, and at least "
            f"{2 * pairs} components, got {list(x.shape)}"
        )


def _pair_count(rotary_dim: int, axes: int) -> int:
    if axes < 1 or rotary_dim < 2 * axes or rotary_dim % 2:
        raise Refused(
            "expected at least one axis, and an even number of components with a pair for each "
            f"axis, got {axes} axes and {rotary_dim} components"
        )
    return rotary_dim // 2


def _near_shares(total: int, axes: int) -> list[int]:
    return [total // axes + (axis < total % axes) for axis in range(axes)]
