"""Read the rotations of transformers' own rotary modules, without rope_patch's reading of them."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_patch.methods import Frequencies


class RotaryModule(NamedTuple):
    """A module that computes cos and sin, and its prefix of `inv_freq` by layer type."""

    module: Any
    prefixes: dict[str | None, str]

    def frequencies(self) -> dict[str | None, Frequencies]:
        """Return what the module holds now, by layer type."""
        return {
            kind: Frequencies(
                getattr(self.module, f"{prefix}inv_freq").double(),
                float(getattr(self.module, f"{prefix}attention_scaling")),
            )
            for kind, prefix in self.prefixes.items()
        }


def find_rotaries(model: nn.Module) -> list[RotaryModule]:
    """Return the rotary modules of a model's text decoder; those of a vision tower are not."""
    text = type(model.config.get_text_config(decoder=True))
    return [
        RotaryModule(module, prefixes)
        for module in model.modules()
        if isinstance(getattr(module, "config", None), text) and (prefixes := _prefixes(module))
    ]


def _prefixes(module: nn.Module) -> dict[str | None, str]:
    names = [name for name in module._buffers if name.endswith("inv_freq")]
    prefixes = [name.removesuffix("inv_freq") for name in names]
    return {
        prefix.removesuffix("_") or None: prefix
        for prefix in prefixes
        if "original" not in prefix and hasattr(module, f"{prefix}attention_scaling")
    }


def transformers_frequencies(
    rotary: RotaryModule, config: PreTrainedConfig
) -> dict[str | None, Frequencies]:
    """Return what transformers computes from a config, whatever the live frequencies are."""
    with torch.device("cpu"):
        return RotaryModule(type(rotary.module)(config), rotary.prefixes).frequencies()


def softmax_mscales(model: nn.Module) -> set[float]:
    """Return the mscales that transformers put into the softmax scales of latent attentions."""
    return {
        round((module.scaling * module.qk_head_dim**0.5) ** 0.5, 12)
        for module in model.modules()
        if hasattr(module, "kv_lora_rank") and hasattr(module, "qk_head_dim")
    }
