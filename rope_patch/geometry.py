"""Geometry: what a model's config says about its rotation, read once, from the config alone.

Live buffers are never consulted: `model.bfloat16()` silently rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Scalings that a config may already apply, and that a new method replaces: it starts again from the
# unscaled frequencies at the original length. The others were trained in, so starting from the
# unscaled frequencies would undo training.
_REPLACEABLE = ("default", "linear", "dynamic", "yarn")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The rotation of one kind of layer, before any extension.

    Attributes:
        head_dim: Size of one attention head (D).
        theta: Rope base.
        trained_length: Tokens that the model saw at once in pretraining.
        rotary_dim: Dimensions of each head that rotate (R); `head_dim` unless given.
        layer_type: The kind of layer this holds for, where a model has several; else None.
    """

    head_dim: int
    theta: float
    trained_length: int
    rotary_dim: int = 0
    layer_type: str | None = None

    def __post_init__(self) -> None:
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.head_dim < 2 or self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and between 2 and head_dim, got rotary_dim="
                f"{self.rotary_dim} with head_dim={self.head_dim}"
            )
        if not self.theta > 1:
            raise ValueError(f"theta (the rope base) must be above 1, got {self.theta}")
        if self.trained_length < 1:
            raise ValueError(f"trained_length must be a token count, got {self.trained_length}")

    def inv_freq(self, theta: float | None = None) -> torch.Tensor:
        """Unscaled frequencies, theta^(-2i / R) for pair i (RoFormer, arXiv:2104.09864).

        Args:
            theta: Another base than the geometry's own.

        Returns:
            Radians per token, float64, `[R / 2]`.
        """
        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
        return (self.theta if theta is None else theta) ** (-pair / self.rotary_dim)


def read_geometries(config: Any, trained_length: int | None = None) -> dict[str | None, Geometry]:
    """Reads the geometry of every layer type from a transformers text config.

    Args:
        config: A decoder's config, as transformers 5 standardises it (`rope_parameters`).
        trained_length: Overrides what the config says about the trained length.

    Returns:
        One geometry a layer type, or a single one under None where all layers rotate alike. Layer
        types without rotation are left out.

    Raises:
        ValueError: The config has no RoPE, or one that was trained with a scaling of its own.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(
            f"{type(config).__name__} has no rope_parameters: expected a decoder with rotary "
            "position embeddings (Llama, Qwen, Gemma, ...)"
        )
    try:
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError as error:  # transformers will not say one size for all layers (Gemma 4)
        raise ValueError(
            f"the layers of {type(config).__name__} have heads of different sizes, which is not "
            "supported yet"
        ) from error
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    geometries = {}
    for layer_type, spelled in by_layer_type(parameters).items():
        geometries[layer_type] = Geometry(
            head_dim=head_dim,
            theta=float(spelled["rope_theta"]),
            trained_length=_trained_length(config, spelled)
            if trained_length is None
            else trained_length,
            rotary_dim=int(head_dim * (spelled.get("partial_rotary_factor") or 1.0)),
            layer_type=layer_type,
        )
    return geometries


def by_layer_type(parameters: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    """Splits `rope_parameters` into one dict a layer type (None where there is just one)."""
    if all(value is None or isinstance(value, dict) for value in parameters.values()):
        return {key: value for key, value in parameters.items() if value is not None}
    return {None: parameters}


def require_replaceable(parameters: dict[str, Any], *, given_length: bool) -> None:
    """Refuses a rotation whose scaling was trained in, or whose original length is unknown.

    Args:
        parameters: `rope_parameters` of one layer type.
        given_length: Whether the caller named the trained length.

    Raises:
        ValueError: Says which scaling is in the way and what to do.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _REPLACEABLE:
        raise ValueError(
            f"the checkpoint's own config already scales its rotation with {kind!r}, and it was "
            "trained that way; rope_patch extends only unscaled rotations so far "
            f"(expected rope_type to be one of {', '.join(_REPLACEABLE)})"
        )
    unknown = "original_max_position_embeddings" not in parameters
    if kind != "default" and unknown and not given_length:
        raise ValueError(
            f"the checkpoint's own config already scales its rotation with {kind!r} and does not "
            "say for how many tokens it was trained before; pass trained_length=..."
        )


def _trained_length(config: Any, parameters: dict[str, Any]) -> int:
    original = parameters.get("original_max_position_embeddings")
    return int(original or config.max_position_embeddings)
