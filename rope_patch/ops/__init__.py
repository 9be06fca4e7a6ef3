"""Rotation of queries and keys, in Triton where it runs and in plain torch everywhere else."""

from rope_patch.ops.angles import cos_sin, pack_frequencies
from rope_patch.ops.dispatch import (
    KERNELS,
    qk_norm_rope,
    rerotate_,
    rope,
    triton_unavailable_reason,
    use_triton,
)

__all__ = [
    "KERNELS",
    "cos_sin",
    "pack_frequencies",
    "qk_norm_rope",
    "rerotate_",
    "rope",
    "triton_unavailable_reason",
    "use_triton",
]
