"""Read rotations of transformers' live rotary modules: after calls, in a batch, after a cast."""

from __future__ import annotations

import formulas
import hf_rotation
import torch
from formulas import Rotation
from published import Published


def _positions(tokens: int) -> torch.Tensor:
    return torch.tensor([[0, tokens - 1]])


def _read(module: torch.nn.Module) -> Rotation:
    return module.inv_freq.double().tolist(), float(module.attention_scaling)


def rotation_after(model: Published, before: int, tokens: int) -> Rotation:
    """Return dynamic scaling's frequencies for a text, after a text of `before` tokens."""
    module = hf_rotation.rotary_class(model)(
        hf_rotation.scaled_config(model, "dynamic", factor=1.0)
    )
    for length in (before, tokens):
        module(torch.zeros(1), _positions(length))
    return _read(module)


def rotation_beside(model: Published, longer: int, tokens: int) -> Rotation:
    """Return the frequencies of a text in a batch with a longer one, by the config's scaling."""
    module = hf_rotation.rotary_class(model)(model.config())
    module(torch.zeros(1), torch.cat([_positions(longer), _positions(tokens)]))
    return _read(module)


def rotation_after_cast(model: Published) -> Rotation:
    """Return the frequencies of the config's scaling after `model.bfloat16()`."""
    return _read(hf_rotation.rotary_class(model)(model.config()).bfloat16())


def part_of_the_head(model: Published, share: float) -> Rotation:
    """Return the rotation of `partial_rotary_factor` outside `proportional`, padded with zeros."""
    frequencies, _ = hf_rotation.rotation(model, "linear", factor=1.0, partial_rotary_factor=share)
    unrotated = len(formulas.default(model)[0]) - len(frequencies)
    return frequencies + [0.0] * unrotated, 1.0
