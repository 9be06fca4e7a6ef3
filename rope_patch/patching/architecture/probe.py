"""Probes: rotary modules of a model's class, made from a config to see what the class does."""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.methods import Frequencies, registered_methods
from rope_patch.methods.position_map import PositionMap
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.defaults import torch_defaults
from rope_patch.rope_config import spelling_hint
from rope_patch.utils.errors import Refused


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


def reference_frequencies(rotary: RotaryModule, config: Any) -> dict[str | None, Frequencies]:
    """Return the frequencies that transformers computes from a config, whatever the live ones are.

    Args:
        rotary: The module whose class to use.
        config: The text config to read.

    Raises:
        ValueError: The class cannot be built from the config.
    """
    return probe_frequencies(make_probe(rotary, config), rotary)


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
