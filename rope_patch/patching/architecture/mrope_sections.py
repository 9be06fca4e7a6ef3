"""Sections of M-RoPE: which of a token's positions each rotated pair takes."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.methods import Frequencies
from rope_patch.patching.architecture.rotary_modules import CANNOT_FOLLOW_YET
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.defaults import torch_defaults
from rope_patch.utils.errors import Refused

AXES = 3  # time, height and width

# Text decoders that are tested under a cache, with positions of text and of images.
_TESTED = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)


@torch_defaults()
def mrope_sections(traits: RotaryTraits) -> tuple[int, ...] | None:
    """Return the axis of each rotated pair (M-RoPE, arXiv:2409.12191), read from a probe.

    Args:
        traits: Facts about the rotary module.

    Returns:
        R / 2 axes: 0 for time, 1 for height, 2 for width. None if a token has one position.

    Raises:
        ValueError: The sections are unknown, so cached keys cannot be re-rotated.
    """
    if not traits.is_mrope:
        return None
    refusal = Refused(
        f"{type(traits.config).__name__} gives a token several positions (M-RoPE), which "
        f"{CANNOT_FOLLOW_YET}"
    )
    if traits.config.model_type not in _TESTED or list(traits.frequencies) != [None]:
        raise refusal
    own = traits.frequencies[None]
    pairs = len(own.inv_freq)
    # With one radian a token, sin(1) marks the pairs of the axis on which the position is 1.
    even = traits.probe_with({None: Frequencies(torch.ones_like(own.inv_freq), 1.0)})
    marks = [_tables(even, position)[1] for position in torch.eye(AXES, dtype=torch.int64)]
    if any(mark.shape != (2 * pairs,) for mark in marks):
        # Qwen2-VL and Qwen2.5-VL up to 5.10, which apply sections in their attention.
        raise Refused(f"{refusal}; or use a newer release of transformers")
    sections = torch.stack(marks).argmax(0)[:pairs]
    position = torch.tensor([5, 19, 11])
    angle = position[sections] * own.inv_freq.float()
    exact_tables = (angle.cos(), angle.sin())
    for table, exact in zip(_tables(traits.probe, position), exact_tables, strict=True):
        if not torch.allclose(table, exact.repeat(2) * own.attention_factor, atol=1e-5):
            raise refusal
    return tuple(sections.tolist())


def _tables(probe: Any, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a probe's cos and sin of one token, `[R]` each, at its `[A]` positions."""
    cos, sin = probe(torch.zeros(1, 1, 4), position.view(AXES, 1, 1))
    return cos.squeeze(), sin.squeeze()
