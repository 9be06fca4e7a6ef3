"""Rotation of one layer type: as numbers, and as transformers' `rope_parameters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.methods import Frequencies
from rope_patch.methods.base import NO_ROTATION
from rope_patch.rope_config import config_rope_type

# Keys of `rope_parameters` that are independent of the scaling.
_PRESERVED_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
_TEMPERATURE = "llama_4_scaling_beta"


@dataclass(frozen=True)
class LayerRotation:
    """Rotation of one layer type.

    Attributes:
        parameters: `rope_parameters` of this layer type in transformers 5.
        frequencies: The same as numbers, at the target length.
        checkpoint_parameters: The checkpoint's own `rope_parameters`.
        checkpoint_frequencies: The checkpoint's own rotation.
        trained_length: Tokens at which an extension starts.
    """

    parameters: dict[str, Any]
    frequencies: Frequencies
    checkpoint_parameters: dict[str, Any]
    checkpoint_frequencies: Frequencies
    trained_length: int

    @property
    def scaling(self) -> str:
        """Return the rope_type of transformers; "default" is none."""
        return config_rope_type(self.parameters)

    @property
    def theta(self) -> float:
        """Return the rope base that `parameters` names."""
        return float(self.parameters["rope_theta"])

    @property
    def attention_factor(self) -> float:
        """Return the multiplier of cos and sin."""
        return self.frequencies.attention_factor

    @property
    def has_temperature(self) -> bool:
        """Return whether queries grow beyond the checkpoint's original length (Ministral 3)."""
        return _TEMPERATURE in self.checkpoint_parameters

    @property
    def stretch(self) -> list[float]:
        """Return the ratio of each pair's wavelength to that of theta alone, `[R / 2]`."""
        inv_freq = self.frequencies.inv_freq
        pair = torch.arange(len(inv_freq), dtype=torch.float64)
        stretch = self.theta ** (-pair / len(inv_freq)) / inv_freq
        return stretch.clamp(max=NO_ROTATION).tolist()

    def as_longrope(self, length: int) -> dict[str, Any]:
        """Return `rope_parameters` of the same rotation as `longrope` with one set of stretches.

        Args:
            length: Tokens at the target.
        """
        preserved = {
            key: self.checkpoint_parameters[key]
            for key in _PRESERVED_KEYS
            if key in self.checkpoint_parameters
        }
        if config_rope_type(self.checkpoint_parameters) == "proportional":
            # For `proportional` it is the share of pairs that rotate.
            preserved.pop("partial_rotary_factor", None)
        if self.has_temperature:
            names = (_TEMPERATURE, "original_max_position_embeddings")
            preserved |= {key: self.checkpoint_parameters[key] for key in names}
        return {
            "rope_type": "longrope",
            "factor": length / self.trained_length,
            "long_factor": self.stretch,
            "short_factor": self.stretch,
            "attention_factor": self.attention_factor,
            "rope_theta": self.theta,
            "original_max_position_embeddings": self.trained_length,
            **preserved,
        }
