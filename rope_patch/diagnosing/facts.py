"""Facts about each layer type, read once for all checks, and the findings of a diagnosis."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from rope_patch.diagnosing.subject import Subject
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method, build, registered_methods
from rope_patch.patching.architecture.rotary_traits import (
    build_rotary,
    output_frequencies,
    reference_frequencies,
)
from rope_patch.patching.geometry_selection import FAR
from rope_patch.rope_config import KNOWN_KEYS, by_layer_type, config_rope_type, read_geometries
from rope_patch.transformers_api.models import rope_functions

# From worst to mildest: the model silently differs from its config; harmful under the named
# conditions; worth knowing.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A fact about a model's rotation that the user should know.

    Attributes:
        severity: One of `SEVERITIES`.
        code: A stable short name, for programs.
        what: The fact, in a sentence.
        evidence: The evidence, with numbers.
        fix: The line to type, or what to change; empty if nothing is to be done.
        layer_type: The layer type it applies to; None for all.
        numbers: The numbers of the evidence.
    """

    severity: str
    code: str
    what: str
    evidence: str
    fix: str = ""
    layer_type: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def json_safe(value: Any) -> Any:
    """Return data for JSON: infinite numbers and NaN become None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {("all" if key is None else key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return value


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """The configured and the actual rotation of one layer type.

    Attributes:
        layer_type: The layer type; None if all layers rotate alike.
        parameters: The config's `rope_parameters` for it.
        scaling: The configured scaling, "default" if none.
        geometry: The unscaled rotation, at the length before that scaling.
        configured_method: The scaling as one of our methods; None if we have no such method.
        actual: The frequencies that transformers computes; None if no model can be built.
        own_keys: The keys of `rope_parameters` that the architecture's own files name.
        actual_far: LongRoPE's frequencies of a text beyond the original length, as the module's
            forward has them; None for other scalings, or if they cannot be read from cos and sin.
    """

    layer_type: str | None
    parameters: dict[str, Any]
    scaling: str
    geometry: Geometry
    configured_method: Method | None
    actual: Frequencies | None
    own_keys: frozenset[str] = frozenset()
    actual_far: Frequencies | None = None

    def configured(self, length: float) -> Frequencies | None:
        """Return the configured frequencies for a sequence of `length` tokens."""
        if self.configured_method is None:
            return None
        frequencies = self.configured_method.frequencies_at(self.geometry, length)
        if (
            self.scaling == "proportional"
        ):  # there the factor also divides the pairs that still rotate
            frequencies = Frequencies(
                frequencies.inv_freq / float(self.parameters.get("factor") or 1.0)
            )
        mscale = "long_mscale" if length > self.geometry.trained_length else "short_mscale"
        if self.scaling == "longrope" and mscale in self.own_keys:  # Phi-3.5-MoE
            frequencies = replace(frequencies, attention_factor=float(self.parameters[mscale]))
        return frequencies


@dataclass(frozen=True, eq=False)
class Facts:
    """The input of all checks.

    Attributes:
        subject: The model.
        layers: Facts by layer type.
        promised_length: Length in tokens that the config promises, its own scaling included.
        target_length: Target length in tokens.
        assumed_length: The length assumed before scaling if the config does not say whether its
            length includes the scaling; else None.
    """

    subject: Subject
    layers: dict[str | None, LayerFacts]
    promised_length: int
    target_length: int
    assumed_length: int | None = None


def read_layer_facts(
    subject: Subject, trained_length: int | None
) -> tuple[dict[str | None, LayerFacts], int | None]:
    """Return the facts of every layer type, with geometries before any scaling.

    Args:
        subject: The model.
        trained_length: Length of pretraining in tokens, if the config is wrong about it.

    Returns:
        The facts by layer type, and the assumed trained length if the config does not say it.

    Raises:
        ValueError: The model has no RoPE, or the config is invalid.
    """
    config, assumed = subject.config, None
    if trained_length is None and (scalings := scalings_without_length(config)):
        trained_length = max_position_embeddings(config)
        assumed = trained_length if scalings & {"linear", "dynamic"} else None
    geometries = read_geometries(config, trained_length, "unscaled")
    parameters = by_layer_type(config.rope_parameters)
    actual: dict[str | None, Frequencies] = {}
    actual_far: dict[str | None, Frequencies] = {}
    own_keys = frozenset().union(*(_keys_named(each.module, config) for each in subject.rotaries))
    for rotary in subject.rotaries:
        try:
            actual |= reference_frequencies(rotary, config)
            if "longrope" in map(config_rope_type, parameters.values()):
                actual_far |= output_frequencies(build_rotary(rotary, config), rotary, FAR)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{type(rotary.module).__name__} cannot be made from what the config says now "
                f"({type(error).__name__}: {error}): compare it with the checkpoint's config.json"
            ) from error
    layers = {}
    for layer_type, geometry in geometries.items():
        layer_actual = actual.get(layer_type)
        if layer_actual is not None:  # configs spell the number of rotating pairs differently
            rotary_dim = 2 * len(layer_actual.inv_freq)
            size = max(geometry.head_dim, rotary_dim)
            geometry = replace(geometry, rotary_dim=rotary_dim, head_dim=size)
        scaling = config_rope_type(parameters[layer_type])
        max_positions = getattr(config, "max_position_embeddings", None)
        max_positions = max_positions if isinstance(max_positions, int) else geometry.trained_length
        method = configured_method(parameters[layer_type], geometry, max_positions)
        layers[layer_type] = LayerFacts(
            layer_type,
            parameters[layer_type],
            scaling,
            geometry,
            method,
            layer_actual,
            own_keys,
            actual_far.get(layer_type),
        )
    return layers, assumed


def _keys_named(*objects: Any) -> frozenset[str]:
    """Return the keys of `rope_parameters` that the files of these objects' classes name."""
    files = {type(each).__module__ for each in objects}
    sources = []
    for name in files & sys.modules.keys():
        with contextlib.suppress(OSError, TypeError):  # typed into a shell
            sources.append(inspect.getsource(sys.modules[name]))
    named = set(re.findall(r"""["'](\w+)["']""", "\n".join(sources)))
    return frozenset(named & KNOWN_KEYS)


def configured_method(parameters: dict[str, Any], geometry: Geometry, full: int) -> Method | None:
    """Return a config's own scaling as one of our methods; None if we have none of that name.

    Args:
        parameters: `rope_parameters` of one layer type.
        geometry: Its unscaled rotation.
        full: `max_position_embeddings`, in tokens.

    Raises:
        ValueError: An option is invalid.
    """
    name = config_rope_type(parameters)
    if name not in registered_methods() or name not in transformers_rope_types():
        return None
    option_names = registered_methods()[name].__dataclass_fields__
    options = {key: parameters[key] for key in option_names if parameters.get(key) is not None}
    if name == "proportional":
        options.pop("factor", None)
    if name == "dynamic":
        options["growth"] = "exact"
    if name == "longrope" and "factor" not in options:
        options["factor"] = max(1.0, full / geometry.trained_length)
    try:
        method = build(name, **options)
        method.frequencies_at(geometry, geometry.trained_length + 1)  # raises if factors do not fit
        return method
    except TypeError as error:
        raise ValueError(f"the config's own {name} cannot be read: {error}") from error


def transformers_rope_types() -> set[str]:
    """Return the rope types that transformers can compute, registered ones included."""
    return {"default", *rope_functions()}


def max_position_embeddings(config: Any) -> int:
    """Return `max_position_embeddings` in tokens; raise ValueError if it is no such number."""
    length = getattr(config, "max_position_embeddings", None)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(
            f"max_position_embeddings must be a whole number of tokens, at least 1, got {length!r} "
            f"in {type(config).__name__}; pass trained_length=... if the architecture has none"
        )
    return length


def scalings_without_length(config: Any) -> set[str]:
    """Return the scalings for which a config does not say the length before scaling.

    Scalings whose formulas contain that length are excluded: without it they are invalid.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return set()
    return {
        config_rope_type(found)
        for found in by_layer_type(parameters).values()
        if config_rope_type(found) not in ("default", "yarn", "llama3", "longrope")
        and found.get("original_max_position_embeddings") is None
        and getattr(config, "original_max_position_embeddings", None) is None
    }


def promised_length(config: Any, layers: dict[str | None, LayerFacts]) -> int:
    """Return the length that a config promises: the largest of its own and its scaling's."""
    lengths = [layer.geometry.trained_length for layer in layers.values()]
    max_positions = getattr(config, "max_position_embeddings", None)
    if isinstance(max_positions, int):
        lengths.append(max_positions)
    for layer in layers.values():
        original = layer.parameters.get("original_max_position_embeddings")
        factor = layer.parameters.get("factor")
        if layer.scaling in ("yarn", "linear") and original and factor:
            lengths.append(round(original * factor))
    return max(lengths)


def frequency_difference(a: Frequencies, b: Frequencies) -> tuple[int, float]:
    """Return how many pairs differ beyond rounding, and the largest ratio (1 or more).

    The ratio is infinite if a pair rotates in only one of them.
    """
    count, farthest = 0, 1.0
    for a_freq, b_freq in zip(a.inv_freq.tolist(), b.inv_freq.tolist(), strict=True):
        low, high = sorted((a_freq, b_freq))
        ratio = 1.0 if low == high else (high / low if low else math.inf)
        count += ratio > 1 + 1e-5
        farthest = max(farthest, ratio)
    return count, farthest
