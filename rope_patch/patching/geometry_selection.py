"""Select the layer types that a request changes, and what it starts from or continues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rope_patch.extension import Extension
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies
from rope_patch.methods.registry import get_method
from rope_patch.methods.yarn import YaRN
from rope_patch.original_config import is_saved_patch, trained_config_length, trained_record
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.architecture.rotary_traits import reference_frequencies
from rope_patch.rope_config import (
    ORIGINAL_LENGTH,
    by_layer_type,
    config_rope_type,
    extends_scaled_frequencies,
    read_geometries,
)
from rope_patch.utils.errors import Refused

FAR = 2**24  # tokens: beyond every original length


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
    # The base is the rotation of long texts, whose attention factor can be another (Phi-3.5-MoE).
    unpatched = [reference_frequencies(rotary, config, FAR) for rotary in rotaries]
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


_ATTENTION_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim")


def read_yarn(parameters: Mapping[str, Any]) -> YaRN:
    """Return a config's YaRN with its constants.

    An `attention_factor` that is the formula's value at the config's factor (Olmo 3) is left to the
    formula.

    Args:
        parameters: `rope_parameters` of one layer type, with `rope_type` "yarn".

    Raises:
        ValueError: A constant is out of range.
    """
    names = ("factor", "beta_fast", "beta_slow", "truncate", *_ATTENTION_OPTIONS)
    yarn = YaRN(**{name: parameters[name] for name in names if parameters.get(name) is not None})
    by_formula = replace(yarn, attention_factor=None)
    if math.isclose(yarn.cos_sin_factor(), by_formula.cos_sin_factor(), rel_tol=1e-6):
        return by_formula
    return yarn


def require_no_shrink(
    extension: Extension,
    config: Any,
    geometries: Mapping[str | None, Geometry],
    model_config: Any,
) -> None:
    """Raise if a request ends below the length that the model reads now.

    That is under its config's YaRN, or under a patch that it was saved with.

    Args:
        extension: The request; `start="unscaled"` allows it. A `trained_length` allows it for a
            saved patch.
        config: The text config that the extension starts from.
        geometries: The geometries that the request starts from.
        model_config: The text config of the unpatched model, with the record of a saved patch.

    Raises:
        ValueError: It does. The message names both lengths.
    """
    if extension.start == "unscaled":
        return
    first = next(iter(geometries.values()))
    saved = getattr(model_config, "max_position_embeddings", None)
    target = _target(extension, first)
    # What no config states is refused as such, unless it is restored.
    is_stated = trained_record(config) is None or trained_config_length(config) is not None
    is_replaced = is_saved_patch(model_config) and extension.trained_length is None and is_stated
    if target is not None and is_replaced and isinstance(saved, int) and target < saved:
        raise Refused(
            f"the model reads {saved:,} tokens now, under the patch that it was saved with, and "
            f"the request ends at {round(target):,}: expected a longer length. "
            f"trained_length={first.trained_length} replaces that patch, and counts the factor "
            "from the length before it"
        )
    own_parameters = by_layer_type(config.rope_parameters)
    scalings = {config_rope_type(own_parameters[layer_type]) for layer_type in geometries}
    if "yarn" not in scalings:
        return
    claimed = getattr(config, "max_position_embeddings", None)
    reaches = [
        round(parameters["factor"] * (parameters.get(ORIGINAL_LENGTH) or first.trained_length))
        for parameters in (own_parameters[layer_type] for layer_type in geometries)
        if config_rope_type(parameters) == "yarn"
    ]
    present = max(
        first.trained_length if first.base else 0,
        claimed if isinstance(claimed, int) else 0,
        *reaches,
    )
    if target is None or target >= present:
        return
    raise Refused(
        f"the model reads {present:,} tokens now, under its config's own yarn, and the request "
        f"ends at {round(target):,}: expected a longer length. start='unscaled' replaces that "
        "yarn, and counts the factor from the length before it"
    )


def _target(extension: Extension, geometry: Geometry) -> float | None:
    """Return the length that a request ends at, in tokens; None if it names none."""
    target: Any = extension.length
    if target is None and isinstance(extension.factor, int | float):
        target = extension.factor * geometry.trained_length
    return target if isinstance(target, int | float) and target > 0 else None


def inherit_constants(
    extension: Extension,
    geometries: Mapping[str | None, Geometry],
    own_parameters: Mapping[str | None, dict[str, Any]],
) -> Extension:
    """Return a request with the constants of the YaRN that it continues as its options.

    Options of the request take precedence. One of `attention_factor`, `mscale` and `mscale_all_dim`
    replaces all three.

    Args:
        extension: The request.
        geometries: The geometries that it starts from.
        own_parameters: The config's `rope_parameters` of each layer type.

    Returns:
        The request itself if it continues no YaRN.

    Raises:
        ValueError: Layer types continue YaRNs with different constants.
    """
    constants = [
        {k: v for k, v in read_yarn(own_parameters[kind]).options().items() if k != "factor"}
        for kind, geometry in geometries.items()
        if geometry.base and config_rope_type(own_parameters[kind]) == "yarn"
    ]
    if not constants or not issubclass(get_method(extension.method), YaRN):
        return extension
    if any(other != constants[0] for other in constants):
        raise Refused(
            "layer types that are extended together must have a YaRN with the same constants in "
            f"the config, got {' and '.join(map(str, constants))}: patch one of them "
            "(layer_types=...)"
        )
    requested = {name: value for name, value in extension.options.items() if value is not None}
    replaced = _ATTENTION_OPTIONS if requested.keys() & set(_ATTENTION_OPTIONS) else ()
    inherited = {name: v for name, v in constants[0].items() if v is not None}
    inherited = {name: v for name, v in inherited.items() if name not in replaced}
    return replace(extension, options={**inherited, **requested})


def total_yarn(requested: YaRN, parameters: Mapping[str, Any]) -> YaRN:
    """Return the YaRN that reaches the requested length from the config's original length."""
    return replace(requested, factor=float(parameters["factor"]) * requested.factor)


def original_geometry(geometry: Geometry, parameters: Mapping[str, Any]) -> Geometry:
    """Return the rotation before the config's YaRN."""
    original = int(parameters[ORIGINAL_LENGTH])
    return replace(geometry, base=(), attention_factor=1.0, trained_length=original)


def continued_frequencies(
    requested: YaRN, geometry: Geometry, parameters: Mapping[str, Any], seq_len: float | None
) -> Frequencies:
    """Compute a YaRN that continues the config's.

    Args:
        requested: The requested YaRN, its factor relative to the present length.
        geometry: The rotation that the model runs with, at its present length.
        parameters: The config's `rope_parameters` of the layer type.
        seq_len: As in `Method.frequencies`.
    """
    share = None if seq_len is None else seq_len / geometry.trained_length
    if share is not None and share <= 1 and requested.is_length_dependent(geometry.trained_length):
        return Frequencies(geometry.inv_freq(), geometry.attention_factor)
    start = original_geometry(geometry, parameters)
    reached = parameters["factor"] * start.trained_length
    return total_yarn(requested, parameters).frequencies(
        start, None if share is None else share * reached
    )
