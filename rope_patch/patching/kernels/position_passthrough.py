"""Positions and packed frequencies in the place of cos and sin, where our kernels rotate.

A model passes two tensors from its rotary module to every layer, which calls one function with
them. If that function is ours, two other tensors can be passed in their place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.ops import pack_frequencies, use_triton
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.patching.replicas import forward_for_replica


def use_exact_positions(x: torch.Tensor, kernels: str) -> bool:
    """Return whether tensors like x are rotated from positions, rather than from cos and sin.

    Compiled graphs keep transformers' own code unless kernels are demanded: Inductor fuses the
    rotation and the norms with the ops around them, and saves as little for the backward pass.
    Traces and forward-mode AD always keep it, because they do not support kernels.

    Args:
        x: A tensor with the device, type and dtype of the tensors to rotate.
        kernels: See `rope_patch.patch`.
    """
    if kernels == "auto" and torch.compiler.is_compiling():
        return False
    ours = kernels == "reference" or use_triton(x, kernels)
    return ours and (torch.compiler.is_compiling() or not needs_plain_torch())


class PositionPassthrough:
    """A rotary module's forward that returns positions and packed frequencies for our kernels.

    Returns cos and sin of the original forward where our kernels do not run.
    """

    def __init__(
        self,
        module: nn.Module,
        prefixes: dict[str | None, str],
        original_forward: Any,
        kernels: str,
    ) -> None:
        self.module = module
        self.attribute_names = {
            layer_type: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for layer_type, prefix in prefixes.items()
        }
        self.original_forward = original_forward
        self.kernels = kernels
        self._packed: dict[str | None, Any] = {}

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not use_exact_positions(x, self.kernels):
            return self.original_forward(x, position_ids, *args, **kwargs)
        layer_type = args[0] if args else kwargs.get("layer_type")
        return position_ids, self.packed_frequencies(layer_type, x.device)

    def packed_frequencies(self, layer_type: str | None, device: torch.device) -> torch.Tensor:
        """Return a layer type's packed frequencies, `[R / 2 + 1]` or `[B, R / 2 + 1]`.

        Packs again only on change, so most decode steps launch no kernel for it.
        """
        name, scale_name = self.attribute_names[layer_type]
        inv_freq, scale = getattr(self.module, name), getattr(self.module, scale_name)
        if not torch.compiler.is_compiling():  # a graph must not depend on eager state
            last_inv_freq, last_scale, packed = self._packed.get(layer_type, (None, None, None))
            if last_inv_freq is inv_freq and last_scale is scale and packed.device == device:
                return packed
        # An inference tensor could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            if inv_freq.ndim == 3:  # other frequencies for each row, `[B, 1, R / 2]`
                packed = pack_frequencies(inv_freq[:, 0], scale.reshape(-1))
            else:
                packed = pack_frequencies(inv_freq, scale)
            packed = packed.to(device)
        if not torch.compiler.is_compiling():
            self._packed[layer_type] = (inv_freq, scale, packed)
        return packed

    def retire(self) -> None:
        """Return cos and sin from now on: the patch is undone, but a wrapper still calls this."""
        self.kernels = "hf"

    def for_replica(self, replica: Any) -> PositionPassthrough:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        copied = PositionPassthrough.__new__(PositionPassthrough)
        own = forward_for_replica(self.original_forward, replica)
        copied.__dict__.update(self.__getstate__(), module=replica, original_forward=own)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": {}}
