"""Restoration of frequencies that a live model lost.

transformers keeps frequencies in non-persistent buffers, which no checkpoint contains. Code that
makes a model on `meta` and then gives it memory (`to_empty`, sharded loaders, trainers) must
compute them again. Where it does not, the model rotates by zeros, by whatever the memory held, or
without the config's scaling: unslothai/unsloth#4112, huggingface/transformers#45902,
pytorch/torchtitan#4783.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.patching.architecture.frequency_buffers import Float32BufferGuard, exact_buffers
from rope_patch.patching.architecture.mla_scale import (
    base_softmax_scale,
    built_softmax_scale,
    find_mla_attentions,
)
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_owner, find_rotaries
from rope_patch.patching.architecture.rotary_traits import build_rotary
from rope_patch.patching.handle import Patch, current
from rope_patch.patching.torch_state import torch_defaults
from rope_patch.patching.undo_log import ABSENT, UndoLog
from rope_patch.utils.errors import Refused

# Attributes that a rotary module computes from its config, with or without a layer type's prefix.
_COMPUTED = (
    "inv_freq",
    "attention_scaling",
    "rope_type",
    "rope_init_fn",
    "max_seq_len_cached",
    "original_max_seq_len",
)
# Attributes that its forward adds, and computes again where they are gone.
_ADDED = ("max_seq_len_cached", "long_inv_freq")


@torch_defaults()
def restore(model: nn.Module) -> list[str]:
    """Give the text decoder of a live model the frequencies of a newly built model, in place.

    The softmax scale of multi-head latent attention (DeepSeek), which holds the attention factor
    squared, is restored with them.

    The values come from the config, not from the buffers, and are those of a module that
    transformers builds anew. An active patch stays in effect: its own frequencies are set again,
    and undoing it restores the unpatched ones, also where they were lost before the patch. The
    length that transformers' `dynamic` scaling has grown to is forgotten.

    Args:
        model: A transformers decoder with RoPE, or anything around one (PEFT, accelerate, compile).

    Returns:
        The names of the buffers and attributes that had other values; empty if all was well.

    Raises:
        ValueError: The model has no RoPE or no memory yet (`meta`), or its rotary modules cannot be
            built from its config. The model is as before.
        TypeError: Not a torch module.
    """
    handle = current(model)
    try:
        rotaries = find_rotaries(model)
    except Refused as refusal:
        raise Refused(
            f"{refusal}. There are no frequencies to restore: a table of positions is among the "
            "weights, and a bias is computed at each call; load the checkpoint's weights again"
        ) from refusal
    devices = [_device_of(model, rotary) for rotary in rotaries]
    states = [_built_state(rotary, _unpatched_config(rotary, handle)) for rotary in rotaries]
    names = {module: name for name, module in model.named_modules()}
    log = UndoLog() if handle is None else handle._undo_log
    scales = list(lost_softmax_scales(model, handle))
    restored = []
    for rotary, device, state in zip(rotaries, devices, states, strict=True):
        module, prefix = rotary.module, names[rotary.module]
        lost = []
        for name, value in (state | _patched_buffers(rotary, handle)).items():
            logged = log.original(module, name)
            if logged is not ABSENT and not _is_same(logged, state[name]):
                log.set_original(module, name, state[name])
                lost.append(name)
            if logged is not ABSENT and not isinstance(value, torch.Tensor):
                continue  # the patch's own, which no change of memory reaches
            if not _is_same(getattr(module, name, None), value):
                set_value = (
                    value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
                )
                setattr(module, name, set_value)
                lost.append(name)
        for name in [n for n in vars(module) if n.endswith(_ADDED) and n not in state]:
            delattr(module, name)
        restored += [f"{prefix}.{name}".lstrip(".") for name in dict.fromkeys(lost)]
        guard = vars(module).get("_apply")
        if isinstance(guard, Float32BufferGuard):
            guard.buffers = _patched_buffers(rotary, handle)
    for lost_scale in scales:
        if log.original(lost_scale.attention, "scaling") is not ABSENT:
            log.set_original(lost_scale.attention, "scaling", lost_scale.built)
        lost_scale.attention.scaling = lost_scale.expected
        restored.append(f"{lost_scale.name}.scaling")
    return restored


@dataclass(frozen=True, eq=False)
class LostScale:
    """A softmax scale that is not what it should be.

    Attributes:
        name: The attention's name in the model.
        attention: The attention.
        present: Its softmax scale.
        expected: What it should be: the patch's, or the config's without one.
        built: What transformers makes it by the unpatched config.
    """

    name: str
    attention: Any
    present: float
    expected: float
    built: float


def lost_softmax_scales(model: nn.Module, handle: Patch | None) -> Iterator[LostScale]:
    """Yield the softmax scales of latent attentions that lost the attention factor, or got another.

    Args:
        model: The model.
        handle: Its active patch.
    """
    names = {module: name for name, module in model.named_modules()}
    plan = None if handle is None else handle._plan
    patched = [] if plan is None else plan.mla_attentions
    for rotary in find_rotaries(model):
        config = _unpatched_config(rotary, handle)
        for attention in find_mla_attentions(find_owner(model, rotary)):
            expected = built = built_softmax_scale(attention, config)
            if plan is not None and any(each is attention for each in patched):
                expected = base_softmax_scale(attention) * plan.shortest_softmax_mscale**2
            present = float(attention.scaling)
            if not math.isclose(present, expected, rel_tol=1e-6):
                yield LostScale(names[attention], attention, present, expected, built)


def lost_patched_buffers(model: nn.Module, handle: Patch) -> Iterator[tuple[RotaryModule, str]]:
    """Yield the buffers of a patched model that do not hold the patch's frequencies."""
    for rotary in find_rotaries(model):
        for name, value in _patched_buffers(rotary, handle).items():
            if not _is_same(getattr(rotary.module, name), value):
                yield rotary, name


def _unpatched_config(rotary: RotaryModule, handle: Patch | None) -> Any:
    module: Any = rotary.module
    return module.config if handle is None else handle.original_config


def _device_of(model: nn.Module, rotary: RotaryModule) -> torch.device:
    """Return the device for a module's frequencies: its own, or the model's if it has none."""
    module: Any = rotary.module
    tensors = [getattr(module, f"{prefix}inv_freq") for prefix in rotary.prefixes.values()]
    for owner in (find_owner(model, rotary), model):
        tensors += owner.parameters()
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    if device is None:
        raise Refused(
            f"{type(model).__name__} is on meta, where frequencies have no values: give it memory "
            "first (model.to_empty(device=...), then its weights), and restore it afterwards"
        )
    return device


def _built_state(rotary: RotaryModule, config: Any) -> dict[str, Any]:
    """Return what transformers computes for a rotary module from a config, by attribute."""
    built = build_rotary(rotary, config)
    everything = {**vars(built), **built._buffers}
    return {name: value for name, value in everything.items() if name.endswith(_COMPUTED)}


def _patched_buffers(rotary: RotaryModule, handle: Patch | None) -> dict[str, torch.Tensor]:
    """Return the frequencies that a patch keeps in a module's buffers; none without a patch."""
    if handle is None or handle._plan is None:
        return {}
    initial = handle.frequencies_at(1)
    for traits in handle._plan.rotaries:
        if traits.rotary.module is rotary.module:
            return exact_buffers(rotary, traits.frequencies, initial)
    return {}


def _is_same(present: Any, value: Any) -> bool:
    """Return whether two values are equal, tensors up to rounding in their computation."""
    if not isinstance(value, torch.Tensor):
        return bool(present == value)
    return (
        isinstance(present, torch.Tensor)
        and not present.is_meta
        and present.dtype == value.dtype
        and present.shape == value.shape
        and torch.allclose(present.cpu(), value, rtol=2e-6, atol=0)
    )
