"""Layers that the `kernels` library puts in the place of a model's own, without any state."""

from __future__ import annotations

import torch
from torch import nn

from rope_patch.ops.plain_torch import rope_from_cos_sin
from rope_patch.ops.reference import rotate


class apply_rotary_transformers(nn.Module):
    """Rotation by the cos and sin that a model computes, for transformers' `rotary_pos_emb`.

    The angles are the model's. Arithmetic is in float32 and rounded once. It is plain torch: the
    Triton kernels compute angles from positions, which this place of a model does not have.
    """

    can_torch_compile = True
    has_backward = True

    # The library rejects classes with other methods, so the helpers are functions.
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, whose pairs are the same index in both halves of a head.

        Args:
            q: Queries, `[B, H, S, D]`, or `[B, S, H, D]` with `unsqueeze_dim=2`.
            k: Keys, the same but for the number of heads.
            cos: `[B, S, D]`, each number twice (Llama), or `[B, S, D / 2]` (gpt-oss).
            sin: The same.
            unsqueeze_dim: Dimension of the heads.

        Raises:
            ValueError: cos and sin do not cover the heads.
        """
        return _rotate_by_tables(q, k, cos, sin, unsqueeze_dim)


def _rotate_by_tables(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    width, dim = cos.shape[-1], q.shape[-1]
    if width not in (dim, dim / 2) or k.shape[-1] != dim or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must have {dim} or {dim // 2} numbers a token for heads of {dim}, got "
            f"cos {list(cos.shape)}, sin {list(sin.shape)} and keys {list(k.shape)}"
        )
    if q.ndim == 4 and cos.ndim == 3 and heads_dim in (1, 2):
        rotated_q, rotated_k = rope_from_cos_sin(
            q, k, cos, sin, heads_dim=heads_dim, repeated=width == dim
        )
        assert rotated_k is not None
        return rotated_q, rotated_k
    cos, sin = (c[..., : dim // 2].unsqueeze(heads_dim) for c in (cos, sin))
    return rotate(q, cos, sin), rotate(k, cos, sin)
