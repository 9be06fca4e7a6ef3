"""Whether frequencies that are set on a rotary module act at all."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.methods import Frequencies
from rope_patch.patching.find import Rotary
from rope_patch.patching.rotary import fresh, hand_out, set_frequencies
from rope_patch.patching.swap import Swaps


def require_effect(rotary: Rotary, config: Any, before: dict[str | None, Frequencies]) -> None:
    """Tries other frequencies on a module of the same kind.

    Args:
        rotary: A model's rotary module.
        config: Its text config.
        before: What the module rotates by when made from that (`unpatched`).

    Raises:
        ValueError: They change nothing, since its forward computes its own.
    """
    module = fresh(rotary, config)
    with torch.device("cpu"):
        x = torch.zeros(1, 2, 4)
        positions = torch.tensor([[3, 5]])
    plain = _outputs(module, rotary, x, positions)
    halved = {
        kind: Frequencies(found.inv_freq / 2, 2.0 * found.attention_factor)
        for kind, found in before.items()
    }
    set_frequencies(Rotary(module, rotary.prefixes), before, halved, Swaps())
    changed = _outputs(module, rotary, x, positions)
    if plain and changed and any(torch.equal(a, b) for a, b in zip(plain, changed, strict=True)):
        raise ValueError(
            f"{type(rotary.module).__name__} computes its frequencies anew in every forward, so "
            "none that are set on it act: this architecture is not supported"
        )


def _outputs(module: Any, rotary: Rotary, x: Any, positions: Any) -> list[torch.Tensor]:
    """What a module makes of positions for each of its layer types."""
    found = []
    for kind in rotary.prefixes:
        try:
            made = hand_out(module, x, positions, kind)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return []  # called in a way of its own: nothing is known
        made = made[0] if isinstance(made, tuple) else made
        found.append(torch.view_as_real(made) if made.is_complex() else made)
    return found
