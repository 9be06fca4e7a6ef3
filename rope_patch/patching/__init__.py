"""Apply a rotation to a live model, and undo it. The only folder that touches a model."""

from rope_patch.patching.handle import Patch, current
from rope_patch.patching.restoration import restore
from rope_patch.utils.front import front

__all__ = ["Patch", "current", "restore"]

front(
    __name__,
    {
        "architecture.attention_source": "inspect_forward",
        "architecture.rotary_modules": "find_rotaries",
        "architecture.rotary_traits": "KeyLayout mrope_sections reference_frequencies RotaryTraits",
        "dynamic.hooks": "LengthHooks",
        "dynamic.rerotation": "KeyRerotation",
        "length_warning": "silence_length_warnings",
        "position_maps.forward_view": "cut_region ForwardView Visibility",
        "position_maps.mapped_attention": "attend_masked",
        "position_maps.shift_tables": "ShiftPositions ShiftRotation",
        "positions": "counted_positions",
        "proof.tiny_model": "CannotShrink tiny_config tiny_model",
    },
)
