"""Rotation of queries and keys: in Triton where it runs, in plain torch everywhere."""

from rope_patch.ops.angles import cos_sin, make_turns
from rope_patch.ops.dispatch import (
    KERNELS,
    on_triton,
    qk_norm_rope,
    rerotate_,
    rope,
    triton_problem,
)

__all__ = [
    "KERNELS",
    "cos_sin",
    "make_turns",
    "on_triton",
    "qk_norm_rope",
    "rerotate_",
    "rope",
    "triton_problem",
]
