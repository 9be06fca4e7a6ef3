"""Apply a rotation to a live model, and undo it. The only folder that touches a model."""

from rope_patch.patching.entry_points import (
    check,
    check_encoding,
    patch,
    patch_rotation,
    prove,
    unpatch,
)
from rope_patch.patching.handle import Patch, current
from rope_patch.patching.replacement.entry_point import encode
from rope_patch.patching.replacement.registry import list_encodings
from rope_patch.patching.restoration import restore
from rope_patch.utils.front import front

__all__ = [
    "Patch",
    "check",
    "check_encoding",
    "current",
    "encode",
    "list_encodings",
    "patch",
    "patch_rotation",
    "prove",
    "restore",
    "unpatch",
]

front(
    __name__,
    {
        "architecture.attention_source": "inspect_forward",
        "architecture.key_layout": "KeyLayout",
        "architecture.mrope_sections": "mrope_sections",
        "architecture.probe": "reference_frequencies",
        "architecture.rotary_modules": "find_rotaries",
        "architecture.rotary_traits": "RotaryTraits",
        "dynamic.hooks": "LengthHooks",
        "dynamic.rerotation": "KeyRerotation",
        "encodings.buckets": "BucketsSite",
        "encodings.slopes": "SlopesSite",
        "encodings.table": "LearnedTableSite SinusoidalTableSite",
        "length_warning": "silence_length_warnings",
        "position_maps.forward_view": "ForwardView",
        "position_maps.masked": "attend_masked",
        "position_maps.pieces": "cut_region",
        "position_maps.shift_tables": "ShiftPositions ShiftRotation",
        "position_maps.visibility": "Visibility",
        "positions": "counted_positions",
        "proof.tiny_model": "CannotShrink tiny_config tiny_model",
        "replacement.encoding": "Span",
        "replacement.hooks": "AttentionHook SharedTensors Slots biased_mask",
    },
)
