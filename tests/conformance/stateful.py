"""What transformers' live rotary modules rotate by, after a call, beside a row, or when cast."""

from __future__ import annotations

import formulas
import hugging
import torch
from formulas import Rotation
from published import Published


def _positions(tokens: int) -> torch.Tensor:
    return torch.tensor([[0, tokens - 1]])


def _read(module: torch.nn.Module) -> Rotation:
    return module.inv_freq.double().tolist(), float(module.attention_scaling)


def rotation_after(model: Published, before: int, tokens: int) -> Rotation:
    """Dynamic scaling's frequencies for a text, after one of `before` tokens."""
    module = hugging.rotary_class(model)(hugging.scaled_config(model, "dynamic", factor=1.0))
    for length in (before, tokens):
        module(torch.zeros(1), _positions(length))
    return _read(module)


def rotation_beside(model: Published, longer: int, tokens: int) -> Rotation:
    """The frequencies of a text in a batch with a longer one, by the model's own scaling."""
    module = hugging.rotary_class(model)(model.config())
    module(torch.zeros(1), torch.cat([_positions(longer), _positions(tokens)]))
    return _read(module)


def rotation_after_cast(model: Published) -> Rotation:
    """The frequencies of the model's own scaling after `model.bfloat16()`."""
    return _read(hugging.rotary_class(model)(model.config()).bfloat16())


def part_of_the_head(model: Published, share: float) -> Rotation:
    """What `partial_rotary_factor` means outside of `proportional`, still pairs filled up."""
    frequencies, _ = hugging.rotation(model, "linear", factor=1.0, partial_rotary_factor=share)
    still = len(formulas.default(model)[0]) - len(frequencies)
    return frequencies + [0.0] * still, 1.0
