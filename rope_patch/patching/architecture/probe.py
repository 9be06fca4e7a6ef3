"""Probe modules: rotary modules of a model's class, made afresh to ask what its code does."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.methods import Frequencies, registered_methods
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.frequency_buffers import set_frequencies
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused


def require_buffer_is_used(
    rotary: RotaryModule, config: Any, before: dict[str | None, Frequencies]
) -> None:
    """Raise if changing `inv_freq` does not change the output of a rotary module of this class.

    Args:
        rotary: A model's rotary module.
        config: Its text config.
        before: The module's frequencies under that config (`reference_frequencies`).

    Raises:
        ValueError: The output stays the same: the forward computes frequencies of its own.
    """
    module = make_probe(rotary, config)
    with torch.device("cpu"):
        x = torch.zeros(1, 2, 4)
        positions = torch.tensor([[3, 5]])
    plain = _probe_outputs(module, rotary, x, positions)
    halved = {
        layer_type: Frequencies(frequencies.inv_freq / 2, 2.0 * frequencies.attention_factor)
        for layer_type, frequencies in before.items()
    }
    set_frequencies(RotaryModule(module, rotary.prefixes), before, halved, UndoLog())
    changed = _probe_outputs(module, rotary, x, positions)
    if plain and changed and any(torch.equal(a, b) for a, b in zip(plain, changed, strict=True)):
        raise Refused(
            f"{type(rotary.module).__name__} computes its frequencies anew in every forward, so "
            "none that are set on it act: this architecture is not supported"
        )


def _probe_outputs(module: Any, rotary: RotaryModule, x: Any, positions: Any) -> list[torch.Tensor]:
    """Return a module's output for each of its layer types; none if it is called in another way."""
    outputs = []
    for layer_type in rotary.prefixes:
        try:
            output = call_rotary(module, x, positions, layer_type)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return []  # another signature: nothing is known
        output = output[0] if isinstance(output, tuple) else output
        outputs.append(torch.view_as_real(output) if output.is_complex() else output)
    return outputs


def make_probe(rotary: RotaryModule, config: Any) -> Any:
    """Make a rotary module of the same class on the CPU, with frequencies that never update.

    Args:
        rotary: The module whose class to use.
        config: The text config to read.
    """
    with torch.device("cpu"):
        module: Any = type(rotary.module)(config)
    # transformers' own updates read rope_type, and would disturb any comparison.
    several = isinstance(module.rope_type, dict)
    module.rope_type = dict.fromkeys(module.rope_type, "default") if several else "default"
    return module


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


@torch_defaults()
def reference_frequencies(rotary: RotaryModule, config: Any) -> dict[str | None, Frequencies]:
    """Return the frequencies that transformers computes from a config, whatever the live ones are.

    Args:
        rotary: The module whose kind to make.
        config: The text config to read.
    """
    try:
        probe = make_probe(rotary, config)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        hint = "compare it with the checkpoint's config.json"
        if isinstance(error, KeyError) and error.args[0] in registered_methods():
            hint = "it names one of rope_patch's scalings: call rope_patch.register() first"
        raise Refused(
            f"{type(rotary.module).__name__} cannot be made from what the config says "
            f"({type(error).__name__}: {error}): {hint}"
        ) from error
    return {
        layer_type: Frequencies(
            getattr(probe, f"{prefix}inv_freq").double(),
            float(getattr(probe, f"{prefix}attention_scaling")),
        )
        for layer_type, prefix in rotary.prefixes.items()
    }
