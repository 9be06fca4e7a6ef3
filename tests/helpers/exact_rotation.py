"""Compute norm and rotation independently: complex float64, angles from exact fractions."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import tau
from typing import Any

import torch

from rope_patch import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Triton's interpreter truncates to bfloat16, where a GPU rounds.
TRUNCATED_DTYPES = {torch.bfloat16} if ops.is_interpreted() else set()


# -- angles ----------------------------------------------------------------------------------------

_BITS = 256


def _arctan_of_inverse(n):
    """Return arctan(1 / n) in units of 2^-256."""
    power, total, sign, odd = (1 << _BITS) // n, 0, 1, 1
    while power:
        total += sign * (power // odd)
        power, sign, odd = power // n**2, -sign, odd + 2
    return total


TWO_PI = Fraction(8 * (4 * _arctan_of_inverse(5) - _arctan_of_inverse(239)), 1 << _BITS)


@lru_cache(maxsize=100_000)
def exact_angle(position, inv_freq):
    """Return position * inv_freq in radians, in [-pi, pi]."""
    rotations = position * Fraction(inv_freq) / TWO_PI
    return float(rotations - round(rotations)) * tau


def exact_angles(positions, inv_freq, sections=None):
    """Return the angles behind `ops.cos_sin`, in float64."""
    if sections is not None:
        tokens = torch.stack([positions[axis] for axis in sections.tolist()], dim=-1)
    else:
        tokens = positions.unsqueeze(-1)
    tokens, freq = torch.broadcast_tensors(
        tokens if tokens.ndim == 3 else tokens[None], inv_freq.reshape(-1, 1, inv_freq.shape[-1])
    )
    pairs = zip(tokens.flatten().tolist(), freq.flatten().tolist(), strict=True)
    return torch.tensor([exact_angle(*pair) for pair in pairs], dtype=torch.float64).view(
        tokens.shape
    )


def frequencies(rotary_dim, theta=1e4):
    """Return radians per token in float32, `[R / 2]`."""
    return (theta ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)).float()


# -- rotation and norm -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotation:
    """One rotation, applied by this package and, as the truth, in float64."""

    positions: torch.Tensor
    inv_freq: torch.Tensor
    factor: Any = 1.0
    sections: torch.Tensor | None = None
    interleaved: bool = False
    heads_dim: int = 2

    @property
    def packed_freqs(self):
        return ops.pack_frequencies(self.inv_freq, self.factor).to(DEVICE)

    @property
    def settings(self):
        sections = self.sections if self.sections is None else self.sections.to(DEVICE)
        return {
            "sections": sections, "interleaved": self.interleaved, "heads_dim": self.heads_dim,
        }  # fmt: skip

    def rope(self, q, k=None, kernels="triton"):
        positions = self.positions.to(DEVICE)
        return ops.rope(q, k, positions, self.packed_freqs, kernels=kernels, **self.settings)

    def norm_and_rope(self, q, k, q_weight, k_weight, kernels="triton", **settings):
        tensors = (q, k, q_weight, k_weight, self.positions.to(DEVICE), self.packed_freqs)
        return ops.qk_norm_rope(*tensors, kernels=kernels, **self.settings, **settings)

    def true_rope(self, x, conjugate=False):
        """Rotate in float64, on the CPU."""
        angles = exact_angles(self.positions.cpu(), self.inv_freq, self.sections)
        angles = (-angles if conjugate else angles).unsqueeze(self.heads_dim)
        factor = torch.as_tensor(self.factor, dtype=torch.float64).view(-1, 1, 1, 1)
        x, size = x.cpu().double(), 2 * angles.shape[-1]
        part = x[..., :size].unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        part = part if self.interleaved else part.transpose(-1, -2)
        rotated = torch.complex(part[..., 0], part[..., 1]) * torch.polar(factor, angles)
        part = torch.stack([rotated.real, rotated.imag], dim=-1)
        part = part if self.interleaved else part.transpose(-1, -2)
        return torch.cat([part.flatten(-2), x[..., size:]], dim=-1)

    def true_norm_and_rope(self, x, weight, eps, offset=0.0):
        """Norm and rotate in float64, on the CPU."""
        dims = (-1,) if weight.ndim == 1 else (-1, self.heads_dim)
        x, weight = x.cpu().double(), weight.cpu().double() + offset
        if weight.ndim == 2 and self.heads_dim == 1:
            weight = weight.unsqueeze(1)
        length = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
        count = x.numel() // max(length.numel(), 1)
        return self.true_rope(x / (length**2 / count + eps).sqrt() * weight)


def make_rotation(rotary_dim, tokens=2, theta=1e4, **changes):
    """Return a rotation of a few tokens, far enough apart that slow pairs rotate, too."""
    rotation = Rotation(torch.arange(tokens) * 37 + 5, frequencies(rotary_dim, theta))
    return replace(rotation, **changes)


def draw(*shape, dtype=torch.float32, seed=0, grad=False):
    """Draw normal numbers; a seed gives the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    return x.requires_grad_() if grad else x


def draw_heads(heads, head_dim, rotation, batch=2, **settings):
    """Draw contiguous queries or keys for a rotation."""
    tokens = rotation.positions.shape[-1]
    middle = (tokens, heads) if rotation.heads_dim == 2 else (heads, tokens)
    return draw(batch, *middle, head_dim, **settings)


# -- how close -------------------------------------------------------------------------------------


def assert_rounded(got, truth, slack=4e-7):
    """Assert that `got` is the truth, rounded once to its dtype.

    `slack` allows for float32 arithmetic, relative to the largest number.
    """
    assert got.shape == truth.shape
    if not truth.numel():
        return
    got, dtype = got.detach().cpu().double(), got.dtype
    assert got.isfinite().all()
    truth = truth.detach()
    info = torch.finfo(dtype)
    ulp = info.eps * truth.abs().clamp(min=info.tiny).log2().floor().exp2()
    allowed = ulp * (1 if dtype in TRUNCATED_DTYPES else 0.5) + slack * truth.abs().max()
    excess = ((got - truth).abs() - allowed).max().item()
    assert excess <= 0, f"off by {(got - truth).abs().max():.3g}, {excess:.3g} more than rounding"


def assert_laid_out_as(got, x):
    """Assert the shape, dtype and strides of a new tensor like `x`."""
    like = torch.empty_like(x)
    assert (got.shape, got.dtype, got.stride()) == (like.shape, like.dtype, like.stride())


def relative_error(got, truth):
    """Return the root mean square of the difference over that of the truth."""
    difference = got.detach().cpu().double() - truth.detach().cpu()
    return (difference.norm() / truth.detach().norm()).item()
