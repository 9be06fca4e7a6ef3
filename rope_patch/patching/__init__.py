"""Apply a rotation to a live model, and undo it.

In go a model and an `Extension`; out comes a `Patch`, the handle of what is in effect. Open `plan`
first, then `handle`.

- `plan` resolves the request, and changes nothing. `architecture` says what the model's code does,
  `geometry_selection` and `method_wrappers` what the extension starts from.
- `handle` applies the plan under the `undo_log`. It installs `dynamic` where frequencies follow the
  length, `position_maps`, `start_tokens`, `kernels` and hooks on attentions
  (`attention_interception`), all of which read positions by the rule of `positions`.
- `stamp` and `length_warning` watch caches and lengths; `restoration` sets lost frequencies again.
- `proof` tries a patch on a tiny model first where transformers is newer than the tested one.

Encodings that do not rotate are changed by the room `encodings`, under the same undo log.
"""

from rope_patch.patching.handle import Patch, current
from rope_patch.patching.restoration import restore
from rope_patch.utils.lazy_exports import export_lazily

__all__ = ["Patch", "current", "restore"]

export_lazily(
    __name__,
    {
        "architecture.attention_source": "inspect_forward",
        "architecture.rotary_modules": "find_rotaries",
        "architecture.rotary_traits": "KeyLayout mrope_sections reference_frequencies RotaryTraits",
        "dynamic.hooks": "LengthHooks",
        "dynamic.rerotation": "KeyRerotation",
        "length_warning": "silence_length_warnings",
        "position_maps.forward_view": "cut_region ForwardView Visibility",
        "position_maps.parts": "attend_masked",
        "position_maps.shift_tables": "ShiftPositions ShiftRotation",
        "positions": "counted_positions",
        "proof.tiny_model": "CannotShrink tiny_config tiny_model",
    },
)
