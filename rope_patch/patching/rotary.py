"""What a rotary module gets: other frequencies, kept in float32, under its own forward.

The module's forward is left alone, so its layout of cos and sin, accelerate's hooks around it and
torch.compile's view of it stay what they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.patching.find import Rotary
from rope_patch.patching.swap import Swaps


def unpatched(rotary: Rotary, config: Any) -> dict[str | None, Frequencies]:
    """The frequencies that transformers itself computes from a config, whatever the live ones are.

    Args:
        rotary: The module whose kind to make.
        config: The text config to read.
    """
    with torch.device("cpu"):
        fresh: Any = type(rotary.module)(config)
    return {
        kind: Frequencies(
            getattr(fresh, f"{prefix}inv_freq").double(),
            float(getattr(fresh, f"{prefix}attention_scaling")),
        )
        for kind, prefix in rotary.prefixes.items()
    }


def set_frequencies(
    rotary: Rotary,
    before: dict[str | None, Frequencies],
    after: dict[str | None, Frequencies],
    swaps: Swaps,
) -> None:
    """Gives a rotary module its frequencies and keeps them exact through casts and moves.

    Layer types that are not to change are touched only where their live frequencies had been cast.

    Args:
        rotary: The module.
        before: What transformers computes for it from the unpatched config.
        after: What it is to turn by, for each layer type to change.
        swaps: Where the changes are recorded.
    """
    module: Any = rotary.module
    exact: dict[str, torch.Tensor] = {}
    for kind, prefix in rotary.prefixes.items():
        name = f"{prefix}inv_freq"
        live = getattr(module, name)
        exact[name] = after.get(kind, before[kind]).inv_freq.float()
        if kind not in after and live.dtype == torch.float32:
            continue
        # Nothing stands on meta to go back to; a model that is materialised meanwhile needs values.
        old = before[kind].inv_freq.float() if live.is_meta else live
        swaps.set(module, name, exact[name].to(live.device), old=old)
    rope_type: Any = module.rope_type
    for kind in rotary.prefixes.keys() & after.keys():
        prefix = rotary.prefixes[kind]
        swaps.set(module, f"{prefix}attention_scaling", after[kind].attention_factor)
        # transformers' own updates ("dynamic", "longrope") look at rope_type; ours must stand.
        rope_type = "default" if kind is None else {**rope_type, kind: "default"}
    swaps.set(module, "rope_type", rope_type)
    swaps.set(module, "_apply", partial(_apply_and_restore, module, exact))


def _apply_and_restore(
    module: Any, exact: dict[str, torch.Tensor], fn: Any, recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply` (to, half, bfloat16, to_empty, ...) that leaves frequencies in float32.

    A model cast to bfloat16 would otherwise rotate by rounded frequencies, cos off by up to 2.
    """
    type(module)._apply(module, fn, recurse)
    for name, inv_freq in exact.items():
        module._buffers[name] = inv_freq.to(module._buffers[name].device)
    return module
