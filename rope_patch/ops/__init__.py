"""Rotate queries and keys, in Triton where it runs and in plain torch everywhere else.

In go tensors, positions and packed frequencies (`angles`); `dispatch` chooses `kernels` or
`plain_torch`, and has `self_check` compare a kernel with `reference` before its first use. Open
`dispatch` first.
"""

from typing import TYPE_CHECKING

from rope_patch.ops.angles import cos_sin, pack_frequencies
from rope_patch.ops.cache_write import rope_into_cache
from rope_patch.ops.dispatch import (
    KERNELS,
    qk_norm_rope,
    rerotate_,
    rope,
    triton_unavailable_reason,
    use_triton,
)
from rope_patch.ops.n_dimensional import (
    axial_frequencies,
    mixed_frequencies,
    n_dimensional_rope,
)
from rope_patch.utils.installation import warn_renamed
from rope_patch.utils.lazy_exports import export_lazily

__all__ = [
    "KERNELS",
    "axial_frequencies",
    "cos_sin",
    "mixed_frequencies",
    "n_dimensional_rope",
    "pack_frequencies",
    "qk_norm_rope",
    "rerotate_",
    "rope",
    "rope_into_cache",
    "triton_unavailable_reason",
    "use_triton",
]

if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name):
        """Return what an old name stands for."""
        if name != "make_turns":
            raise AttributeError(f"module 'rope_patch.ops' has no attribute {name!r}")
        warn_renamed("rope_patch.ops.make_turns", "rope_patch.ops.pack_frequencies")
        return pack_frequencies


export_lazily(
    __name__,
    {
        "angles": "rerotation_frequencies",
        "attention": "mapped_attention",
        "attention_reference": "AttentionRegions",
        "hub.layers": "apply_rotary_transformers",
        "modes": "copy_to_device is_interpreted",
        "output_inversion": "can_recompute_from_output",
        "plain_torch": "rope_from_cos_sin",
        "self_check": "KernelVariant",
        "validation": "may_share_memory overlaps_itself",
    },
)
