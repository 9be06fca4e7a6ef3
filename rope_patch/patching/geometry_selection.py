"""Select the layer types that a request changes, and the frequencies that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.rope_config import (
    by_layer_type,
    config_rope_type,
    extends_scaled_frequencies,
    read_geometries,
)
from rope_patch.utils.errors import Refused


def select_layer_types(
    geometries: dict[str | None, Geometry], layer_types: Sequence[str] | None, config: Any
) -> dict[str | None, Geometry]:
    """Return the geometries that a request changes; raise ValueError for an unknown layer type."""
    known = [layer_type for layer_type in geometries if layer_type is not None]
    if layer_types is None:
        # Layers with a window never meet a distance that they were not trained on.
        windows = ["sliding", "chunked", *(["main"] if config.model_type == "deepseek_v4" else [])]
        far = [each for each in known if not any(window in each for window in windows)]
        return {layer_type: geometries[layer_type] for layer_type in far or geometries}
    if not layer_types or not set(layer_types) <= set(known):
        names = list(layer_types) if isinstance(layer_types, tuple) else layer_types
        has = f"has the layer types {', '.join(known)}" if known else "rotates all layers alike"
        raise Refused(
            f"layer_types={names!r} does not fit: {type(config).__name__} {has}"
            + ("" if known else "; leave layer_types out")
        )
    return {layer_type: geometries[layer_type] for layer_type in layer_types}


def base_geometries(
    config: Any,
    rotaries: Sequence[RotaryModule],
    trained_length: int | None = None,
    layer_types: Sequence[str] | None = None,
    start: str = "auto",
) -> dict[str | None, Geometry]:
    """Return the geometry that an extension starts from, per layer type it changes.

    Args:
        config: The text config without a patch.
        rotaries: The model's rotary modules.
        trained_length: Tokens of pretraining, if the config is wrong about it.
        layer_types: As in `patch`.
        start: As in `patch`.

    Raises:
        ValueError: The config has no rotation, or an invalid one.
    """
    geometries = select_layer_types(
        read_geometries(config, trained_length, start), layer_types, config
    )
    unpatched = [reference_frequencies(rotary, config) for rotary in rotaries]
    known = {layer_type for frequencies in unpatched for layer_type in frequencies}
    return {
        layer_type: resolve_base(geometry, unpatched, config, start)
        if layer_type in known
        else geometry
        for layer_type, geometry in geometries.items()
    }


def resolve_base(
    geometry: Geometry,
    unpatched: list[dict[str | None, Frequencies]],
    config: Any,
    start: str,
) -> Geometry:
    """Return a geometry with the architecture's own dimensions, and the base that `start` selects.

    Configs spell the number of rotated pairs in several ways, so transformers' module decides it.
    """
    layer_type = geometry.layer_type
    reference = next(
        (frequencies[layer_type] for frequencies in unpatched if layer_type in frequencies), None
    )
    if reference is None:
        raise Refused(f"{type(config).__name__} names {layer_type!r}, but no module rotates by it")
    rotary_dim = 2 * len(reference.inv_freq)
    sized = replace(geometry, rotary_dim=rotary_dim, head_dim=max(geometry.head_dim, rotary_dim))
    parameters = by_layer_type(config.rope_parameters)[layer_type]
    if not extends_scaled_frequencies(config, parameters, start):
        return sized
    running = reference.inv_freq
    if config_rope_type(parameters) == "longrope":  # the module starts with the short factors
        stretch = torch.tensor(parameters["long_factor"], dtype=torch.float64, device="cpu")
        running = sized.unscaled_inv_freq() / stretch
    return replace(sized, base=tuple(running.tolist()), attention_factor=reference.attention_factor)
