"""Positions and packed frequencies in the place of cos and sin, where our kernels rotate.

A model passes two tensors from its rotary module to every layer, which calls one function with
them. If that function is ours, two other tensors can be passed in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rope_patch.ops import pack_frequencies, use_triton
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.patching.replicas import forward_for_replica


def use_exact_positions(x: torch.Tensor, kernels: str) -> bool:
    """Return whether tensors like x are rotated from positions, rather than from cos and sin.

    Compiled graphs keep transformers' own code unless kernels are demanded: Inductor fuses the
    rotation and the norms with the ops around them, and saves as little for the backward pass.
    Traces, forward-mode AD and torch.func always keep it, because they do not support kernels.

    Args:
        x: A tensor with the device, type and dtype of the tensors to rotate.
        kernels: See `rope_patch.patch`.
    """
    if torch.compiler.is_compiling():
        return kernels != "auto" and (kernels == "reference" or use_triton(x, kernels))
    if kernels == "auto":
        return use_triton(x)  # which asks for the modes, too, but raises in none
    return not needs_plain_torch() and (kernels == "reference" or use_triton(x, kernels))


class _PackedFrequencies(NamedTuple):
    """Packed frequencies and what they were packed from."""

    inv_freq: torch.Tensor
    scale: Any
    inv_freq_version: int
    scale_version: int
    packed: torch.Tensor

    def is_of(self, inv_freq: torch.Tensor, scale: Any) -> bool:
        """Return whether they were packed from these very objects, unchanged since."""
        return (
            self.inv_freq is inv_freq
            and self.scale is scale
            and self.inv_freq_version == _version(inv_freq)
            and self.scale_version == _version(scale)
        )


def _version(x: Any) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count it."""
    return x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0


class PositionPassthrough:
    """A rotary module's forward that returns positions and packed frequencies for our kernels.

    Returns cos and sin of the original forward where our kernels do not run, and where a sequence
    is to keep the bits of the plain model, which no other rounding gives.
    """

    def __init__(
        self,
        module: nn.Module,
        prefixes: dict[str | None, str],
        original_forward: Any,
        kernels: str,
        keeps_bits: Callable[[], bool] | None = None,
    ) -> None:
        self.module = module
        self.keeps_bits = keeps_bits
        self.attribute_names = {
            layer_type: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for layer_type, prefix in prefixes.items()
        }
        self.original_forward = original_forward
        self.kernels = kernels
        self._packed: dict[str | None, _PackedFrequencies] = {}

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keeps_bits = self.keeps_bits if self.kernels == "auto" else None
        # Asked second, because a compiled graph, which has transformers' code, cannot contain it.
        if not use_exact_positions(x, self.kernels) or (keeps_bits is not None and keeps_bits()):
            return self.original_forward(x, position_ids, *args, **kwargs)
        layer_type = next(iter((*args, *kwargs.values())), None)  # whatever its name
        return position_ids, self.packed_frequencies(layer_type, x.device)

    def packed_frequencies(self, layer_type: str | None, device: torch.device) -> torch.Tensor:
        """Return a layer type's packed frequencies, `[R / 2 + 1]` or `[B, R / 2 + 1]`.

        Packs again only on change, so most decode steps launch no kernel for it.
        """
        name, scale_name = self.attribute_names[layer_type]
        inv_freq, scale = getattr(self.module, name), getattr(self.module, scale_name)
        if not torch.compiler.is_compiling():  # a graph must not depend on eager state
            last = self._packed.get(layer_type)
            if last is not None and last.is_of(inv_freq, scale) and last.packed.device == device:
                return last.packed
        # An inference tensor could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            if inv_freq.ndim == 3:  # other frequencies for each row, `[B, 1, R / 2]`
                packed = pack_frequencies(inv_freq[:, 0], scale.reshape(-1))
            else:
                packed = pack_frequencies(inv_freq, scale)
            packed = packed.to(device)
        if not torch.compiler.is_compiling():
            self._packed[layer_type] = _PackedFrequencies(
                inv_freq, scale, _version(inv_freq), _version(scale), packed
            )
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
