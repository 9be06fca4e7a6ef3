"""The reference rotation in plain torch, which every faster implementation must equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rope_patch.ops.angles import cos_sin

# Tokens rotated at once, so that float32 temporaries stay small beside the cache.
_CHUNK_TOKENS = 4096

# Bits of float32's mantissa that a narrower type lacks.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13}


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the leading dimensions of each head (RoFormer, arXiv:2104.09864, equation 34).

    Args:
        x: Queries or keys, `[..., D]`.
        cos: One number for each rotated pair, `[..., R / 2]`, broadcast against `x`.
        sin: The same.
        interleaved: Whether a pair is two neighbours (GPT-J, Cohere) rather than the same index in
            both halves of the rotated dimensions (Llama, GPT-NeoX).

    Returns:
        `[..., D]` in `x`'s dtype; computed in float32 or wider and rounded once. Dimensions beyond
        the first R keep their values.
    """
    rotary_dim = 2 * cos.shape[-1]
    rotated = _rotate_pairs(x[..., :rotary_dim], cos, sin, interleaved)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys to their positions, by exact angles; see `rope_patch.ops.rope`.

    Args:
        q: Queries, `[B, S, H, D]`.
        k: Keys, `[B, S, K, D]`, if any.
        positions: See `rope_patch.ops.angles.cos_sin`.
        packed_freqs: See `rope_patch.ops.angles.pack_frequencies`.
        sections: See `rope_patch.ops.angles.cos_sin`.
        interleaved: See `rotate`.
        heads_dim: Dimension of the heads: 2, or 1 for `[B, H, S, D]`.

    Returns:
        Both, rotated, in their dtypes.
    """
    cos, sin = (c.unsqueeze(heads_dim) for c in cos_sin(positions, packed_freqs, sections))
    rotated = (None if x is None else rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return next(rotated), next(rotated)  # type: ignore[return-value]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0, heads_dim: int = 2
) -> torch.Tensor:
    """Apply RMSNorm (arXiv:1910.07467) to heads; round once.

    Args:
        x: Queries or keys, `[B, S, H, D]`.
        weight: `[D]` if each head is normed by itself (Qwen 3, Gemma 3), `[H, D]` if all heads of a
            token are normed together (OLMo 2).
        eps: Added to the mean of squares.
        offset: Added to the weight; 1 for Gemma.
        heads_dim: See `rope`.

    Returns:
        The shape of `x`, in float32 or wider.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [-1] if weight.ndim == 1 else [-1, heads_dim]
    normed = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    scale = weight.to(wide.dtype) + offset
    if weight.ndim == 2 and heads_dim == 1:
        scale = scale[:, None]
    return normed * scale


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm to queries and keys, then `rope`; see `rms_norm` for the arguments."""
    normed = (
        rms_norm(x, weight, eps=eps, offset=offset, heads_dim=heads_dim)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    layout: Any = {"sections": sections, "interleaved": interleaved, "heads_dim": heads_dim}
    rotated_q, rotated_k = rope(next(normed), next(normed), positions, packed_freqs, **layout)
    assert rotated_k is not None
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)


@torch.no_grad()
def rerotate_(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Re-rotate keys, in place and exactly; see `rope_patch.ops.rerotate_`.

    Keys in 16 bits are rounded stochastically: up with the probability of their distance from the
    lower neighbour. So they do not drift over many changes, where rounding to the nearest would
    undo each small rotation.

    Args:
        layers: Keys of one or several layers on one device, `[B, K, S, D]` each. The first R
            dimensions of each head are rotated.
        positions: Token positions, `[B, S]` or `[S]`.
        packed_freqs: Difference of the frequencies, `[R / 2 + 1]` or `[B, R / 2 + 1]`; see
            `rerotation_frequencies`.
        interleaved: See `rotate`.
    """
    for chunk in _chunks(positions):
        cos, sin = (c[:, None] for c in cos_sin(positions[..., chunk], packed_freqs))
        _rotate_layers_(layers, chunk, cos, sin, interleaved)


@torch.no_grad()
def rerotate_as_transformers_(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    scale: torch.Tensor,
    *,
    sections: Sequence[int] | None = None,
    interleaved: bool = False,
) -> None:
    """Re-rotate keys that transformers rotated, whose angles are products in float32.

    The result equals rotating the keys afresh, up to one rounding to their dtype. Differences are
    taken in float64, so angles do not drift.

    Args:
        layers: See `rerotate_`.
        positions: Token positions, `[B, S]`; `[A, B, S]` with sections.
        old: The frequencies of the keys, radians per token, `[B, R / 2]`.
        new: The frequencies to rotate them to.
        scale: New attention factor / old one, `[B]`.
        sections: The axis that each pair takes its position from, R / 2 of A axes (M-RoPE).
        interleaved: See `rotate`.
    """
    device = layers[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    old_freqs, new_freqs = (f.to(device, torch.float32)[:, None] for f in (old, new))
    factor = scale.to(device, wide)[:, None, None]
    for chunk in _chunks(positions):
        tokens = positions[..., chunk].to(device, torch.float32)
        tokens = tokens[..., None] if sections is None else tokens[list(sections)].movedim(0, -1)
        angle = (tokens * new_freqs).to(wide) - (tokens * old_freqs).to(wide)
        cos, sin = ((f(angle) * factor).float()[:, None] for f in (torch.cos, torch.sin))
        _rotate_layers_(layers, chunk, cos, sin, interleaved)


def _chunks(positions: torch.Tensor) -> Iterator[slice]:
    for start in range(0, positions.shape[-1], _CHUNK_TOKENS):
        yield slice(start, start + _CHUNK_TOKENS)


def _rotate_layers_(
    layers: Sequence[torch.Tensor],
    chunk: slice,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    for keys in layers:
        part = keys[:, :, chunk, : 2 * cos.shape[-1]]
        part.copy_(_stochastic_round(_rotate_pairs(part, cos, sin, interleaved), keys.dtype))


def _rotate_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


def _stochastic_round(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 up or down at random so that the mean is exact (stochastic rounding)."""
    spare = _SPARE_BITS.get(dtype)
    if spare is None:
        return x.to(dtype)
    bits = x.view(torch.int32)
    # The random bits are a hash of the number itself, so equal keys always become equal keys.
    noise = (bits ^ (bits >> 15)) * -1640531535  # wraps around; the golden ratio mixes well
    noise = (noise ^ (noise >> 13)) * -2048144777
    up = bits + ((noise >> 7) & (2**spare - 1))
    rounded = (up & -(2**spare)).view(torch.float32)
    # The noise would carry a NaN of all ones over to -0.
    return torch.where(x.isnan(), x, rounded).to(dtype)
