"""Positions and turns in the place of cos and sin, where our kernels rotate.

A model asks its rotary module for two tensors and hands them to every layer, which unpack them and
call one function with them. So two others can travel the same way, if that function is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.ops import pack_frequencies, use_triton
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.patching.replicas import forward_for_replica


def use_exact_positions(x: torch.Tensor, kernels: str) -> bool:
    """Whether a rotation of tensors like x starts from positions, rather than from cos and sin.

    Compiled graphs keep transformers' own code unless kernels are demanded: Inductor fuses the
    rotation and the norms with what is around them, and keeps as little for the backward pass.
    Traces and forward-mode AD always keep it, because kernels cannot take part in them.

    Args:
        x: What has the device, type and dtype of what is to be rotated.
        kernels: See `rope_patch.patch`.
    """
    if kernels == "auto" and torch.compiler.is_compiling():
        return False
    ours = kernels == "reference" or use_triton(x, kernels)
    return ours and (torch.compiler.is_compiling() or not needs_plain_torch())


class PositionPassthrough:
    """A rotary module's forward, which returns positions and turns for our kernels.

    Everybody else gets cos and sin from the forward that stood there before.
    """

    def __init__(
        self, module: nn.Module, prefixes: dict[str | None, str], own: Any, kernels: str
    ) -> None:
        self.module = module
        self.attribute_names = {
            kind: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for kind, prefix in prefixes.items()
        }
        self.original_forward = own
        self.kernels = kernels
        self._packed: dict[str | None, Any] = {}

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not use_exact_positions(x, self.kernels):
            return self.original_forward(x, position_ids, *args, **kwargs)
        kind = args[0] if args else kwargs.get("layer_type")
        return position_ids, self.packed_frequencies(kind, x.device)

    def packed_frequencies(self, kind: str | None, device: torch.device) -> torch.Tensor:
        """What a layer type turns by, `[R / 2 + 1]` or `[B, R / 2 + 1]`; made anew if it changed.

        It rarely does, and a decoding step then starts no kernel for it.
        """
        name, scale_name = self.attribute_names[kind]
        inv_freq, scale = getattr(self.module, name), getattr(self.module, scale_name)
        if not torch.compiler.is_compiling():  # a graph would depend on what eager code made
            of, by, made = self._packed.get(kind, (None, None, None))
            if of is inv_freq and by is scale and made.device == device:
                return made
        # What inference mode makes could not be kept for a backward pass later on.
        with torch.inference_mode(False), torch.no_grad():
            if inv_freq.ndim == 3:  # other frequencies for each row, `[B, 1, R / 2]`
                turns = pack_frequencies(inv_freq[:, 0], scale.reshape(-1))
            else:
                turns = pack_frequencies(inv_freq, scale)
            turns = turns.to(device)
        if not torch.compiler.is_compiling():
            self._packed[kind] = (inv_freq, scale, turns)
        return turns

    def retire(self) -> None:
        """Hand out cos and sin from now on: the patch is undone, but a wrapper calls this."""
        self.kernels = "hf"

    def for_replica(self, replica: Any) -> PositionPassthrough:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        made = PositionPassthrough.__new__(PositionPassthrough)
        own = forward_for_replica(self.original_forward, replica)
        made.__dict__.update(self.__getstate__(), module=replica, original_forward=own)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": {}}
