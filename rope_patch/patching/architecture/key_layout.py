"""How a decoder's cached keys are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.patching.architecture.mrope_sections import mrope_sections
from rope_patch.patching.architecture.rotary_traits import RotaryTraits


@dataclass(frozen=True)
class KeyLayout:
    """How cached keys are rotated.

    Attributes:
        interleaved: Whether the pairs are neighbours; see `rope_patch.ops.rope`.
        is_backward: Whether positive angles rotate backward.
        is_normalized: Whether keys are normalized after the rotation, so that their length tells
            nothing of the attention factor.
        sections: The axis that each rotated pair takes its position from, R / 2 of them; None where
            a token has one position (see `mrope_sections`).
    """

    interleaved: bool
    is_backward: bool = False
    is_normalized: bool = False
    sections: tuple[int, ...] | None = None

    @classmethod
    def of(cls, traits: RotaryTraits) -> KeyLayout:
        """Return the layout of a decoder that caches whole keys.

        Raises:
            ValueError: The keys are rotated in an unknown layout, or by unknown positions.
        """
        config: Any = traits.config
        if config.model_type == "llama4_text":
            return cls(interleaved=True, is_normalized=config.use_qk_norm)
        if config.model_type == "nanochat":
            return cls(interleaved=False, is_backward=True, is_normalized=True)
        sections = mrope_sections(traits)
        return cls(traits.is_interleaved, sections=sections)

    def applied(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return frequencies and attention factors as they act on cached keys.

        Args:
            frequencies: `[B, R / 2 + 1]`, the attention factor last.
        """
        applied = frequencies.clone()
        if self.is_backward:
            applied[:, :-1] *= -1
        if self.is_normalized:
            applied[:, -1] = 1
        return applied
