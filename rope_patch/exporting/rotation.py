"""One layer type's rotation: as numbers, and as transformers spells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.methods import Frequencies
from rope_patch.methods.base import NO_ROTATION
from rope_patch.rope_config import config_rope_type

# Keys of `rope_parameters` that hold whatever the scaling is.
_PRESERVED_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class LayerRotation:
    """How one layer type rotates.

    Attributes:
        parameters: As transformers 5 spells it, `rope_parameters` of this layer type.
        frequencies: The same as numbers, at the target length.
        checkpoint_parameters: The `rope_parameters` that the checkpoint has itself.
        checkpoint_frequencies: What the checkpoint rotates by itself.
        trained_length: Tokens that an extension starts from.
    """

    parameters: dict[str, Any]
    frequencies: Frequencies
    checkpoint_parameters: dict[str, Any]
    checkpoint_frequencies: Frequencies
    trained_length: int

    @property
    def scaling(self) -> str:
        """The name of transformers' scaling; "default" is none."""
        return config_rope_type(self.parameters)

    @property
    def theta(self) -> float:
        """The rope base that `parameters` names."""
        return float(self.parameters["rope_theta"])

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin."""
        return self.frequencies.attention_factor

    @property
    def stretch(self) -> list[float]:
        """By how much each pair's wavelength is longer than theta alone makes it, `[R / 2]`."""
        inv_freq = self.frequencies.inv_freq
        pair = torch.arange(len(inv_freq), dtype=torch.float64)
        found = self.theta ** (-pair / len(inv_freq)) / inv_freq
        return found.clamp(max=NO_ROTATION).tolist()

    def as_longrope(self, length: int) -> dict[str, Any]:
        """The rotation as `longrope` with one set of stretches, whatever its own spelling is.

        Args:
            length: Tokens at the target.
        """
        stays = {
            key: self.checkpoint_parameters[key]
            for key in _PRESERVED_KEYS
            if key in self.checkpoint_parameters
        }
        if config_rope_type(self.checkpoint_parameters) == "proportional":
            stays.pop("partial_rotary_factor", None)  # there it is about which pairs turn
        return {
            "rope_type": "longrope",
            "factor": length / self.trained_length,
            "long_factor": self.stretch,
            "short_factor": self.stretch,
            "attention_factor": self.attention_factor,
            "rope_theta": self.theta,
            "original_max_position_embeddings": self.trained_length,
            **stays,
        }
