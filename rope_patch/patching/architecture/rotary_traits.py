"""Find out facts about a model's rotary module with probes of its class.

`RotaryTraits` has the facts, and makes those that take a forward when they are read. `KeyLayout`
says how cached keys are rotated, with the sections of M-RoPE from `mrope_sections`.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies, registered_methods
from rope_patch.methods.position_map import PositionMap
from rope_patch.ops.reference import rotate
from rope_patch.patching.architecture.attention_source import rotates_one_tensor
from rope_patch.patching.architecture.frequency_buffers import set_frequencies
from rope_patch.patching.architecture.rotary_modules import (
    CANNOT_FOLLOW_YET,
    RotaryModule,
    find_decoder,
    find_owner,
    find_reader,
    is_liger_function,
    is_mrope,
    why_no_decoder,
)
from rope_patch.patching.torch_state import torch_defaults
from rope_patch.patching.undo_log import UndoLog
from rope_patch.rope_config import spelling_hint
from rope_patch.transformers_api.models import APPLY_ROTATION
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
        traits = cls(rotary, config, owner, reader, decoder, probe, frequencies)
        if traits.is_buffer_used:
            return traits
        frequencies = output_frequencies(build_rotary(rotary, config), rotary, 1) or frequencies
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
        apply: Any = getattr(sys.modules[type(self.rotary.module).__module__], APPLY_ROTATION, None)
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
    def is_buffer_used(self) -> bool:
        """Return whether changing `inv_freq` changes the module's output; see `is_buffer_used`."""
        return is_buffer_used(self.probe, self.rotary, self.frequencies)

    def probe_with(self, frequencies: dict[str | None, Frequencies]) -> Any:
        """Return a copy of the probe with other frequencies, for some or all layer types."""
        return _probe_with(self.probe, self.rotary, self.frequencies, frequencies)

    @cached_property
    @torch_defaults()
    def _cos(self) -> torch.Tensor:
        """Return the probe's cos, or complex numbers, for two tokens."""
        x, positions = torch.zeros(1, 2, 4), torch.tensor([[1, 2]])
        layer_type = next(iter(self.rotary.prefixes))
        return as_tuple(call_rotary(self.probe, x, positions, layer_type))[0]


def make_probe(rotary: RotaryModule, config: Any) -> Any:
    """Make a rotary module of the same class on the CPU, with frequencies that never update.

    Args:
        rotary: The module whose class to use.
        config: The text config to read.

    Raises:
        ValueError: The class cannot be built from the config.
    """
    module = build_rotary(rotary, config)
    # transformers' own updates read rope_type, and would disturb any comparison.
    several = isinstance(module.rope_type, dict)
    module.rope_type = dict.fromkeys(module.rope_type, "default") if several else "default"
    return module


@torch_defaults()
def build_rotary(rotary: RotaryModule, config: Any) -> Any:
    """Build a rotary module of the same class on the CPU, as transformers builds it for a model.

    Args:
        rotary: The module whose class to use.
        config: The text config to read.

    Raises:
        ValueError: The class cannot be built from the config.
    """
    try:
        module: Any = type(rotary.module)(config)
        _ = module.rope_type  # its absence is an error of the class, too
        return module
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        hint = "compare it with the checkpoint's config.json"
        name = error.args[0] if isinstance(error, KeyError) else None
        if (method_class := registered_methods().get(str(name))) is not None:
            hint = (
                f"no config can name {name!r}, which maps positions in attention: write "
                f"rope_type 'default', and call rope_patch.patch(model, {name!r})"
                if issubclass(method_class, PositionMap)
                else "it names one of rope_patch's scalings: call "
                "rope_patch.register_rope_types() first"
            )
        raise Refused(
            f"{type(rotary.module).__name__} cannot be made from what the config says "
            f"({type(error).__name__}: {error}): {hint}"
            f"{spelling_hint(getattr(config, 'rope_parameters', None))}"
        ) from error


def reference_frequencies(
    rotary: RotaryModule, config: Any, length: int = 1
) -> dict[str | None, Frequencies]:
    """Return the frequencies that transformers computes from a config, whatever the live ones are.

    Args:
        rotary: The module whose class to use.
        config: The text config to read.
        length: The text's tokens, for a class that computes its rotation anew in every forward;
            for all others these are the frequencies that a new module has.

    Raises:
        ValueError: The class cannot be built from the config.
    """
    probe = make_probe(rotary, config)
    frequencies = probe_frequencies(probe, rotary)
    if is_buffer_used(probe, rotary, frequencies):
        return frequencies
    return output_frequencies(build_rotary(rotary, config), rotary, length) or frequencies


@torch_defaults()
def output_frequencies(
    module: Any, rotary: RotaryModule, length: int
) -> dict[str | None, Frequencies]:
    """Return the frequencies that a module's cos and sin have in a text of `length` tokens.

    Args:
        module: A new module of the class.
        rotary: The module whose class it is of.
        length: The text's tokens.

    Returns:
        The frequencies by layer type; none where cos and sin are not of pairs half a head apart.
    """
    x, positions = torch.zeros(1, 3, 4), torch.tensor([[0, 1, max(length - 1, 1)]])
    frequencies = {}
    for layer_type in rotary.prefixes:
        try:
            cos, sin = as_tuple(call_rotary(module, x, positions, layer_type))
            cos, sin = cos[0].double(), sin[0].double()
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return {}  # another signature, or complex numbers
        pairs = cos.shape[-1] // 2
        if cos.ndim != 2 or not torch.equal(cos[:, :pairs], cos[:, pairs:]):
            return {}
        # A pair turns by less than half a circle from one token to the next: no angle wraps.
        inv_freq = torch.atan2(sin[1, :pairs], cos[1, :pairs])
        frequencies[layer_type] = Frequencies(inv_freq, float(cos[0, 0]))
    return frequencies


@torch_defaults()
def is_buffer_used(
    probe: Any, rotary: RotaryModule, frequencies: dict[str | None, Frequencies]
) -> bool:
    """Return whether changing `inv_freq` changes a probe's output, or that is unknown.

    If not, the forward computes frequencies of its own.
    """
    halved = {
        layer_type: Frequencies(own.inv_freq / 2, 2.0 * own.attention_factor)
        for layer_type, own in frequencies.items()
    }
    x, positions = torch.zeros(1, 2, 4), torch.tensor([[3, 5]])
    plain, changed = (
        probe_outputs(each, rotary, x, positions)
        for each in (probe, _probe_with(probe, rotary, frequencies, halved))
    )
    if not plain or not changed:
        return True
    return not any(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def _probe_with(
    probe: Any,
    rotary: RotaryModule,
    before: dict[str | None, Frequencies],
    after: dict[str | None, Frequencies],
) -> Any:
    """Return a copy of a probe with other frequencies, for some or all layer types."""
    changed = copy.deepcopy(probe, {id(probe.config): probe.config})
    set_frequencies(RotaryModule(changed, rotary.prefixes), before, after, UndoLog())
    return changed


@torch_defaults()
def probe_frequencies(probe: Any, rotary: RotaryModule) -> dict[str | None, Frequencies]:
    """Return the frequencies of a new probe, by layer type.

    Args:
        probe: The probe.
        rotary: The module whose class it is of.
    """
    return {
        layer_type: Frequencies(
            getattr(probe, f"{prefix}inv_freq").double(),
            float(getattr(probe, f"{prefix}attention_scaling")),
        )
        for layer_type, prefix in rotary.prefixes.items()
    }


def call_rotary(
    module: Any, x: torch.Tensor, positions: torch.Tensor, layer_type: str | None
) -> Any:
    """Call a rotary module, with three positions a token where it expects them (M-RoPE).

    Args:
        module: The module.
        x: A tensor with the dtype and device of the result.
        positions: `[B, S]`.
        layer_type: The layer type, where it has several.
    """
    extra = () if layer_type is None else (layer_type,)
    if hasattr(module, "mrope_section"):
        positions = positions[None].expand(3, *positions.shape)
    return module(x, positions, *extra)


def as_tuple(output: Any) -> tuple[torch.Tensor, ...]:
    """Return a rotary module's cos and sin, or its one tensor of complex numbers (Llama 4)."""
    return output if isinstance(output, tuple) else (output,)


def probe_outputs(
    module: Any, rotary: RotaryModule, x: torch.Tensor, positions: torch.Tensor
) -> list[torch.Tensor]:
    """Return a module's output for each of its layer types; none if it is called in another way."""
    outputs = []
    for layer_type in rotary.prefixes:
        try:
            output = call_rotary(module, x, positions, layer_type)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return []  # another signature: nothing is known
        output = as_tuple(output)[0]
        outputs.append(torch.view_as_real(output) if output.is_complex() else output)
    return outputs


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


@dataclass(frozen=True)
class KeyLayout:
    """How cached keys are rotated.

    Attributes:
        interleaved: Whether the pairs are neighbours; see `rope_patch.ops.rope`.
        is_backward: Whether positive angles rotate backward.
        is_normalized: Whether keys are normalized after the rotation, so that their length tells
            nothing of the attention factor.
        sections: The axis that each rotated pair takes its position from, R / 2 of them; None where
            a token has one position (see `mrope_sections`).
    """

    interleaved: bool
    is_backward: bool = False
    is_normalized: bool = False
    sections: tuple[int, ...] | None = None

    @classmethod
    def of(cls, traits: RotaryTraits) -> KeyLayout:
        """Return the layout of a decoder that caches whole keys.

        Raises:
            ValueError: The keys are rotated in an unknown layout, or by unknown positions.
        """
        config: Any = traits.config
        if config.model_type == "llama4_text":
            return cls(interleaved=True, is_normalized=config.use_qk_norm)
        if config.model_type == "nanochat":
            return cls(interleaved=False, is_backward=True, is_normalized=True)
        sections = mrope_sections(traits)
        return cls(traits.is_interleaved, sections=sections)

    def applied(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return frequencies and attention factors as they act on cached keys.

        Args:
            frequencies: `[B, R / 2 + 1]`, the attention factor last.
        """
        applied = frequencies.clone()
        if self.is_backward:
            applied[:, :-1] *= -1
        if self.is_normalized:
            applied[:, -1] = 1
        return applied
