"""The public ops in plain torch, for devices, dtypes and modes that the kernels do not run in."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.ops import reference
from rope_patch.ops.angles import cos_sin
from rope_patch.ops.cpu import rope_from_cos_sin
from rope_patch.ops.validation import validate_shapes


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    inplace: bool,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate as `rope_patch.ops.rope` does."""
    require_torch_backend(kernels)
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim)
    layout: Any = {"interleaved": interleaved, "heads_dim": heads_dim}
    if kernels == "auto":  # faster on a CPU, and the same as the reference elsewhere
        cos, sin = cos_sin(positions, packed_freqs, sections)
        rotated = rope_from_cos_sin(q, k, cos, sin, repeated=False, may_overwrite=inplace, **layout)
    else:
        rotated = reference.rope(q, k, positions, packed_freqs, sections=sections, **layout)
    return copy_inplace(q, k, *rotated) if inplace else rotated


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    eps: float,
    offset: float,
    interleaved: bool,
    heads_dim: int,
    inplace: bool,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate as `rope_patch.ops.qk_norm_rope` does."""
    require_torch_backend(kernels)
    validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, q_weight, k_weight)
    rotated = reference.qk_norm_rope(
        q, k, q_weight, k_weight, positions, packed_freqs, eps=eps, offset=offset,
        sections=sections, interleaved=interleaved, heads_dim=heads_dim,
    )  # fmt: skip
    return copy_inplace(q, k, *rotated) if inplace else rotated


def copy_inplace(
    q: torch.Tensor, k: Any, rotated_q: torch.Tensor, rotated_k: torch.Tensor | None
) -> tuple[torch.Tensor, Any]:
    """Copy results into queries and keys, unless they are there already."""
    if rotated_q is not q:
        q.copy_(rotated_q)
    if k is not None and rotated_k is not None and rotated_k is not k:
        k.copy_(rotated_k)
    return q, k


def require_torch_backend(kernels: str) -> None:
    """Raise if `kernels` names neither plain torch nor a free choice."""
    if kernels not in ("auto", "reference"):
        raise ValueError(f'kernels must be "auto", "reference" or "triton" here, got {kernels!r}')
