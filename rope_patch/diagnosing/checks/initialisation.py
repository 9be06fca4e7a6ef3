"""Check that a live model's frequencies were computed at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from rope_patch.diagnosing.finding import Finding
from rope_patch.diagnosing.layer_facts import Facts, LayerFacts
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.mla_scale import base_softmax_scale
from rope_patch.patching.restoration import lost_patched_buffers, lost_softmax_scales

# Frequencies of pairs that rotate lie far above: 1e-20 is theta 1e20 without any scaling.
_SMALLEST = 1e-20
# Factors within which frequencies may exceed 1, and exceed the pair before (LongRoPE's factors).
_LARGEST, _ASCENT = 1.01, 4.0


def loss_of_frequencies(
    rotary: RotaryModule, prefix: str, layer: LayerFacts, *, has_weights: bool
) -> str | None:
    """Return in which way a buffer's frequencies were never computed; None if they were.

    Args:
        rotary: The rotary module.
        prefix: The layer type's prefix within the module.
        layer: Facts about the layer type, with its actual frequencies.
        has_weights: Whether the model's weights have memory.
    """
    assert layer.actual is not None
    module: Any = rotary.module
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        buffer = getattr(module, name, None)
        if not isinstance(buffer, torch.Tensor):
            continue
        if buffer.is_meta:
            if has_weights:
                return "they have no memory (meta), though the weights have"
            continue
        values, expected = buffer.detach().double().cpu(), layer.actual.inv_freq
        if values.shape == expected.shape and torch.allclose(values, expected, rtol=2e-6, atol=0):
            continue  # as transformers computes them, however odd the config's factors are
        if problem := _impossible_values(values, expected):
            return f"{problem} in {name}"
    if _lacks_scaling(module, prefix, layer):
        return f"they are the plain ones: nothing scales them as the config's {layer.scaling!r}"
    return None


def _impossible_values(values: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return why values cannot be frequencies of any rotation; None if they can."""
    if values.shape != expected.shape:
        return None
    stray = int((~values.isfinite()).sum())
    if stray:
        return f"{stray} of {len(values)} are NaN or infinite"
    rotates = expected > 0
    if not values[rotates].any():
        return "all are zero"
    limit = _LARGEST * max(1.0, float(expected.max()))
    stray = int(((values < 0) | (values > limit) | (rotates & (values < _SMALLEST))).sum())
    if stray:
        return f"{stray} of {len(values)} are zero, negative or above {limit:.3g}"
    rotating = values[rotates]
    ascents = int((rotating[1:] > _ASCENT * rotating[:-1]).sum())
    return f"{ascents} of {len(values)} are far faster than the pair before" if ascents else None


def _lacks_scaling(module: Any, prefix: str, layer: LayerFacts) -> bool:
    """Return whether a module that was built for a scaling holds the unscaled frequencies."""
    built = module.rope_type[layer.layer_type] if prefix else module.rope_type
    live, plain = getattr(module, f"{prefix}inv_freq"), layer.geometry.unscaled_inv_freq()
    if built != layer.scaling or layer.scaling in ("default", "dynamic") or live.is_meta:
        return False
    assert layer.actual is not None
    return (
        live.shape == plain.shape
        and not torch.allclose(plain, layer.actual.inv_freq, rtol=1e-5, atol=0)
        and torch.allclose(live.double().cpu(), plain, rtol=2e-6, atol=0)
    )


def uninitialised_finding(layer_type: str | None, problem: str, *, live: Any = None) -> Finding:
    """Return the finding for frequencies that were never computed.

    Args:
        layer_type: The layer type.
        problem: In which way; see `loss_of_frequencies`.
        live: The buffer, if it has values.
    """
    numbers = {}
    if live is not None and not live.is_meta:
        finite = live.double()[live.double().isfinite()]
        numbers = {
            "pairs": len(live),
            "zeros": int((live == 0).sum()),
            "largest": float(finite.abs().max()) if len(finite) else math.inf,
        }
    return Finding(
        "error",
        "frequencies-not-initialised",
        "the frequencies that the model rotates by were never computed: they are in no checkpoint, "
        "and code that gives a model of meta its memory has to compute them anew",
        problem,
        "rope_patch.restore(model)",
        layer_type,
        numbers,
    )


def patched_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about buffers that lost the frequencies of an active patch."""
    subject = facts.subject
    if not subject.live or subject.handle is None or subject.model is None:
        return
    for rotary, name in lost_patched_buffers(subject.model, subject.handle):
        layer_type = next(key for key, p in rotary.prefixes.items() if f"{p}inv_freq" == name)
        problem = f"{name} does not hold the frequencies of {subject.handle}"
        yield uninitialised_finding(layer_type, problem, live=getattr(rotary.module, name))


def softmax_scale_finding(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if latent attentions lack the attention factor in their softmax scale."""
    subject = facts.subject
    if not subject.live or subject.model is None:
        return
    lost = list(lost_softmax_scales(subject.model, subject.handle))
    if not lost:
        return
    first = lost[0]
    base = base_softmax_scale(first.attention)
    of = f"{subject.handle}" if subject.handle else "the config"
    yield Finding(
        "error",
        "softmax-scale-lost",
        f"the softmax scale of {len(lost)} latent attention{'s' if len(lost) > 1 else ''} is not "
        f"that of {of}"
        + (
            ": the attention factor, which it holds squared (mscale), was lost"
            if math.isclose(first.present, base, rel_tol=1e-6)
            else ""
        ),
        f"{first.name}.scaling is {first.present:.6g} instead of {first.expected:.6g}: logits of "
        f"its attention are {first.present / first.expected:.4g} times what they should be",
        "rope_patch.restore(model)",
        numbers={"attentions": len(lost), "ratio": first.present / first.expected},
    )


def has_weights(model: Any) -> bool:
    """Return whether any of a model's weights has memory."""
    return any(not parameter.is_meta for parameter in model.parameters())
