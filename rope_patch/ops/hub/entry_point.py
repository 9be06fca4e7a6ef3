"""Rotation of queries and keys by exact angles, in Triton on a GPU and in plain torch on a CPU.

`rope` rotates, `qk_norm_rope` applies RMSNorm and rotates; both are differentiable. They take the
positions of the tokens and packed frequencies, which `pack_frequencies` makes. `layers` has what
transformers takes instead of its own rotation.
"""

from rope_patch.ops import (
    axial_frequencies,
    cos_sin,
    mixed_frequencies,
    n_dimensional_rope,
    pack_frequencies,
    qk_norm_rope,
    rerotate_,
    rope,
    triton_unavailable_reason,
)
from rope_patch.ops.hub import layers

__all__ = [
    "axial_frequencies",
    "cos_sin",
    "layers",
    "mixed_frequencies",
    "n_dimensional_rope",
    "pack_frequencies",
    "qk_norm_rope",
    "rerotate_",
    "rope",
    "triton_unavailable_reason",
]
