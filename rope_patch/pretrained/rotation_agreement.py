"""Whether two rotations of a model agree: of patches, of sidecars and of a config."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from rope_patch.methods.base import Rotation
from rope_patch.patching import Patch
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.patching.architecture.rotary_modules import find_owner, find_rotaries
from rope_patch.patching.mla_scale import config_mscale, filter_by_layer_type, find_mla_attentions
from rope_patch.pretrained.recorded_rotation import sidecar_frequencies
from rope_patch.pretrained.sidecar import extension_from_sidecar
from rope_patch.rope_config import by_layer_type, config_rope_type


def describe_patch(handle: Patch) -> str:
    """Describe a patch in one line: method, lengths, options, layer types and start."""
    options = {k: v for k, v in handle.method.options().items() if k != "factor" and v is not None}
    layer_types = [str(name) for name in handle.geometries if name is not None]
    extends_scaled = any(geometry.base for geometry in handle.geometries.values())
    return "; ".join(
        [
            str(handle),
            *(
                f"{k}={f'[{len(v)} numbers]' if isinstance(v, list) else v}"
                for k, v in options.items()
            ),
            *([f"layers {', '.join(layer_types)}"] if layer_types else []),
            *(["start='running'"] if extends_scaled else []),
        ]
    )


def rotate_alike(first: Patch, second: Patch) -> bool:
    """Return whether two patches of one model change sequences of all lengths alike."""
    if first.method.start_token_count != second.method.start_token_count:
        return False
    lengths = {1.0}
    for handle in (first, second):
        trained, target = handle.trained_length, handle.length or 4 * handle.trained_length
        lengths |= {trained, trained + 1, 1.5 * trained, target, 2 * target}
    # Layer types that a patch does not change rotate as in the unpatched model.
    original = first.original_frequencies | second.original_frequencies
    for length in lengths:
        ours, theirs = (
            Rotation(original | handle.frequencies_at(length), handle.softmax_mscale)
            for handle in (first, second)
        )
        if not ours.close_to(theirs):
            return False
        if _attention_changes(first, length) != _attention_changes(second, length):
            return False
    return True


def _attention_changes(handle: Patch, length: float) -> tuple[object, ...]:
    """Return what a patch changes besides frequencies, and in which layers."""
    changes = handle.method.attention_changes(length, handle.trained_length)
    return (changes, set(handle.geometries)) if changes else ()


def matches_sidecar(handle: Patch, sidecar: dict[str, Any]) -> bool:
    """Return whether a patch has the frequencies of a sidecar."""
    return Rotation(handle.frequencies).close_to(Rotation(sidecar_frequencies(sidecar)))


def config_already_rotates_so(model: nn.Module, sidecar: dict[str, Any]) -> bool:
    """Return whether the base's own config has the recorded rotation, as a saved patch's has."""
    expected = sidecar_frequencies(sidecar)
    trained_length = sidecar["trained_length"]
    method, _ = extension_from_sidecar(sidecar).resolve(trained_length)
    if (
        not expected
        or method.start_token_count
        or method.is_length_dependent(trained_length)
        or method.attention_changes(math.inf, trained_length)
    ):
        return False
    rotaries = find_rotaries(model)
    config: Any = rotaries[0].module.config
    own_parameters = by_layer_type(config.rope_parameters)
    for layer_type in expected:
        parameters = own_parameters.get(layer_type, {})
        is_switching = parameters.get("long_factor") != parameters.get("short_factor")
        if config_rope_type(parameters) == "dynamic" or is_switching:
            return False  # the frequencies change with the length
    attentions = [a for rotary in rotaries for a in find_mla_attentions(find_owner(model, rotary))]
    for attention in filter_by_layer_type(attentions, config, expected):
        if abs(config_mscale(attention, config) - sidecar.get("sharpening", 1.0)) > 1e-6:
            return False
    module_frequencies = [reference_frequencies(rotary, config) for rotary in rotaries]
    return all(
        layer_type in by_type and by_type[layer_type].close_to(frequencies)
        for by_type in module_frequencies
        for layer_type, frequencies in expected.items()
    )
