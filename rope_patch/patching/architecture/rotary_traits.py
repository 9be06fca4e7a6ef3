"""Facts about a model's rotary module, found with one probe of its class."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.ops.reference import rotate
from rope_patch.patching.architecture.attention_source import APPLY, rotates_one_tensor
from rope_patch.patching.architecture.probe import (
    as_tuple,
    call_rotary,
    make_probe,
    probe_frequencies,
    probe_outputs,
)
from rope_patch.patching.architecture.rotary_modules import (
    CANNOT_FOLLOW_YET,
    RotaryModule,
    find_decoder,
    find_owner,
    find_reader,
    is_mrope,
    why_no_decoder,
)
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.frequency_buffers import set_frequencies
from rope_patch.patching.kernels.liger import is_liger_function
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused


@dataclass(frozen=True, eq=False)
class RotaryTraits:
    """Facts about one of a model's rotary modules; those that need a forward are found when read.

    Where a module has several layer types, the layout of cos and sin is that of the first.

    Attributes:
        rotary: The rotary module.
        config: The text config of the unpatched model.
        owner: The module's parent.
        reader: The innermost module around it whose forward takes tokens, if any.
        decoder: The innermost one that takes positions, a mask and a cache, too, if any.
        probe: A module of the same class (`make_probe`), which never changes.
        frequencies: The unpatched frequencies of each layer type.
    """

    rotary: RotaryModule
    config: Any
    owner: nn.Module
    reader: nn.Module | None
    decoder: nn.Module | None
    probe: Any
    frequencies: dict[str | None, Frequencies]

    @classmethod
    def of(cls, model: nn.Module, rotary: RotaryModule, config: Any) -> RotaryTraits:
        """Return the facts about one of a model's rotary modules.

        Args:
            model: The model.
            rotary: One of its rotary modules.
            config: The text config of the unpatched model.

        Raises:
            ValueError: The class cannot be built from the config.
        """
        probe = make_probe(rotary, config)
        frequencies = probe_frequencies(probe, rotary)
        reader, decoder = find_reader(model, rotary), find_decoder(model, rotary)
        owner = find_owner(model, rotary)
        return cls(rotary, config, owner, reader, decoder, probe, frequencies)

    @property
    def name(self) -> str:
        """Return the name of the module's class."""
        return type(self.rotary.module).__name__

    def require_decoder(self, *, is_owner: bool = True) -> nn.Module:
        """Return the decoder.

        Args:
            is_owner: Whether it must be the owner, so that one module rotates all layers.

        Raises:
            ValueError: No decoder's forward takes all of `DECODER_ARGUMENTS`.
        """
        if self.decoder is not None and (self.decoder is self.owner or not is_owner):
            return self.decoder
        why = (
            why_no_decoder(self.reader)
            if self.decoder is None
            else f"is a part of {type(self.owner).__name__}, and not of the decoder itself"
        )
        raise Refused(
            f"{self.name} {why}, so no length can be followed: use a method whose frequencies "
            "stay, such as yarn"
        )

    @property
    def is_mrope(self) -> bool:
        """Return whether a token has several positions (M-RoPE), each for some pairs."""
        return is_mrope(self.rotary.module, self.config)

    @cached_property
    @torch_defaults()
    def is_interleaved(self) -> bool:
        """Return whether the rotated pairs are neighbours, rather than half a head apart.

        Rotates a random key by the `apply_rotary_pos_emb` of the model's modeling file, and
        compares the result with both layouts.

        Raises:
            ValueError: The model rotates in neither layout.
        """
        apply: Any = getattr(sys.modules[type(self.rotary.module).__module__], APPLY, None)
        if is_liger_function(apply):
            return False  # Liger rotates halves only, and cannot be probed: it runs on GPUs only
        layer_type, own = next(iter(self.frequencies.items()))
        inv_freq = own.inv_freq.float()
        positions = torch.tensor([[0, 1, 7, 30]])
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 2, 4, 2 * len(inv_freq), generator=generator)
        angle = positions[..., None] * inv_freq
        cos, sin = (f(angle)[:, None] * own.attention_factor for f in (torch.cos, torch.sin))
        if apply is not None:
            try:
                cos_sin = call_rotary(self.probe, keys, positions, layer_type)
                rotated = (
                    apply(keys, *as_tuple(cos_sin))
                    if rotates_one_tensor(apply)
                    else apply(keys, keys, *as_tuple(cos_sin))[1]
                )
            except (TypeError, ValueError, RuntimeError, AttributeError):
                rotated = None  # another signature: another kind of rotation
            for interleaved in (False, True):
                expected = rotate(keys, cos, sin, interleaved=interleaved)
                if isinstance(rotated, torch.Tensor) and torch.allclose(
                    rotated, expected, atol=1e-5
                ):
                    return interleaved
        raise Refused(
            f"{self.name} turns keys neither as pairs of neighbours nor of halves, and other ways "
            f"{CANNOT_FOLLOW_YET}"
        )

    @property
    def has_half_tables(self) -> bool:
        """Return whether cos and sin hold each pair's number once, not twice (DeepSeek-V4)."""
        own = next(iter(self.frequencies.values()))
        return bool(self._cos.shape[-1] < 2 * len(own.inv_freq))

    @property
    def repeats_interleaved(self) -> bool:
        """Return whether cos and sin hold each number twice in a row (Cohere), not half by half."""
        return torch.equal(self._cos[..., 0::2], self._cos[..., 1::2])

    @cached_property
    @torch_defaults()
    def supports_per_row_frequencies(self) -> bool:
        """Return whether the module's forward accepts frequencies per row, `[B, 1, R / 2]`.

        Not in transformers 5.0.
        """
        module = self.probe_with(self.frequencies)
        layer_type, prefix = next(iter(self.rotary.prefixes.items()))
        name = f"{prefix}inv_freq"
        own = getattr(module, name)
        arguments = (torch.zeros(2, 3, 4), torch.arange(3)[None], layer_type)
        row_outputs = []
        for inv_freq in (own, own / 2):
            setattr(module, name, inv_freq)
            row_outputs.append(as_tuple(call_rotary(module, *arguments)))
        setattr(module, name, torch.stack([own, own / 2])[:, None])
        try:
            together = as_tuple(call_rotary(module, *arguments))
        except RuntimeError:
            return False
        expected = [torch.cat(parts) for parts in zip(*row_outputs, strict=True)]
        return all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))

    @cached_property
    @torch_defaults()
    def is_buffer_used(self) -> bool:
        """Return whether changing `inv_freq` changes the module's output, or that is unknown.

        If not, the forward computes frequencies of its own.
        """
        halved = {
            layer_type: Frequencies(frequencies.inv_freq / 2, 2.0 * frequencies.attention_factor)
            for layer_type, frequencies in self.frequencies.items()
        }
        x, positions = torch.zeros(1, 2, 4), torch.tensor([[3, 5]])
        plain, changed = (
            probe_outputs(probe, self.rotary, x, positions)
            for probe in (self.probe, self.probe_with(halved))
        )
        if not plain or not changed:
            return True
        return not any(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))

    def probe_with(self, frequencies: dict[str | None, Frequencies]) -> Any:
        """Return a copy of the probe with other frequencies, for some or all layer types."""
        probe = copy.deepcopy(self.probe, {id(self.config): self.config})
        rotary = RotaryModule(probe, self.rotary.prefixes)
        set_frequencies(rotary, self.frequencies, frequencies, UndoLog())
        return probe

    @cached_property
    @torch_defaults()
    def _cos(self) -> torch.Tensor:
        """Return the probe's cos, or complex numbers, for two tokens."""
        x, positions = torch.zeros(1, 2, 4), torch.tensor([[1, 2]])
        layer_type = next(iter(self.rotary.prefixes))
        return as_tuple(call_rotary(self.probe, x, positions, layer_type))[0]
