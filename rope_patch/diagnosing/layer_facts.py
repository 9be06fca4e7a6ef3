"""What is known about each layer type, read once for all checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch.diagnosing.subject import Subject
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method, build, registered_methods
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.rope_config import by_layer_type, config_rope_type, read_geometries


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """One layer type.

    Attributes:
        layer_type: Its name; None where all layers rotate alike.
        parameters: What the config says about its rotation.
        scaling: The scaling that it asks for, "default" if none.
        geometry: Its unscaled rotation, at the length before that scaling.
        configured_method: The scaling as a method of ours; None where it is none that we have.
        actual: What transformers makes of the config; None where no model of it can be made.
    """

    layer_type: str | None
    parameters: dict[str, Any]
    scaling: str
    geometry: Geometry
    configured_method: Method | None
    actual: Frequencies | None

    def configured(self, length: float) -> Frequencies | None:
        """The rotation that the config asks for, for a sequence of `target_length` tokens."""
        if self.configured_method is None:
            return None
        found = self.configured_method.frequencies_at(self.geometry, length)
        if self.scaling == "proportional":  # there it also divides what still turns
            found = Frequencies(found.inv_freq / float(self.parameters.get("factor") or 1.0))
        return found


@dataclass(frozen=True, eq=False)
class Facts:
    """Everything that checks look at.

    Attributes:
        subject: The model.
        layers: Each layer type.
        promised_length: Tokens that the config promises, its own scaling included.
        target_length: The target length in tokens.
        assumed_length: What was taken for the length before a scaling that may or may not be part
            of it, where the config does not say; else None.
    """

    subject: Subject
    layers: dict[str | None, LayerFacts]
    promised_length: int
    target_length: int
    assumed_length: int | None = None


def read_layer_facts(
    subject: Subject, trained_length: int | None
) -> tuple[dict[str | None, LayerFacts], int | None]:
    """Reads every layer type at the start before any scaling.

    Args:
        subject: The model.
        trained_length: Tokens of pretraining, if the config does not tell the truth about them.

    Returns:
        The layer types, and what was taken for the trained length where the config does not say.

    Raises:
        ValueError: No RoPE, or a config that says what cannot be.
    """
    config, assumed = subject.config, None
    if trained_length is None and (silent := scalings_without_length(config)):
        trained_length = max_position_embeddings(config)
        assumed = trained_length if silent & {"linear", "dynamic"} else None
    geometries = read_geometries(config, trained_length, "unscaled")
    parameters = by_layer_type(config.rope_parameters)
    runs: dict[str | None, Frequencies] = {}
    for rotary in subject.rotaries:
        try:
            runs |= reference_frequencies(rotary, config)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{type(rotary.module).__name__} cannot be made from what the config says now "
                f"({type(error).__name__}: {error}): compare it with the checkpoint's config.json"
            ) from error
    layers = {}
    for kind, geometry in geometries.items():
        own = runs.get(kind)
        if own is not None:  # how many pairs turn is not spelled alike in all configs
            rotary_dim = 2 * len(own.inv_freq)
            size = max(geometry.head_dim, rotary_dim)
            geometry = replace(geometry, rotary_dim=rotary_dim, head_dim=size)
        scaling = config_rope_type(parameters[kind])
        full = getattr(config, "max_position_embeddings", None)
        full = full if isinstance(full, int) else geometry.trained_length
        asked = configured_method(parameters[kind], geometry, full)
        layers[kind] = LayerFacts(kind, parameters[kind], scaling, geometry, asked, own)
    return layers, assumed


def configured_method(parameters: dict[str, Any], geometry: Geometry, full: int) -> Method | None:
    """A config's own scaling as one of our methods; None where we have none of that name.

    Args:
        parameters: `rope_parameters` of one layer type.
        geometry: Its unscaled rotation.
        full: `max_position_embeddings`, in tokens.

    Raises:
        ValueError: An option that cannot be.
    """
    name = config_rope_type(parameters)
    if name not in registered_methods() or name not in transformers_rope_types():
        return None
    known = registered_methods()[name].__dataclass_fields__
    options = {key: parameters[key] for key in known if parameters.get(key) is not None}
    if name == "proportional":
        options.pop("factor", None)
    if name == "dynamic":
        options["growth"] = "exact"
    if name == "longrope" and "factor" not in options:
        options["factor"] = max(1.0, full / geometry.trained_length)
    try:
        method = build(name, **options)
        method.frequencies_at(
            geometry, geometry.trained_length + 1
        )  # refuses factors that do not fit
        return method
    except TypeError as error:
        raise ValueError(f"the config's own {name} cannot be read: {error}") from error


def transformers_rope_types() -> set[str]:
    """The scalings that transformers can compute, those that were registered included."""
    return {"default", *ROPE_INIT_FUNCTIONS}


def max_position_embeddings(config: Any) -> int:
    """`max_position_embeddings`, in tokens; ValueError where it is no such number."""
    found = getattr(config, "max_position_embeddings", None)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(
            f"max_position_embeddings must be a whole number of tokens, at least 1, got {found!r} "
            f"in {type(config).__name__}; pass trained_length=... if the architecture has none"
        )
    return found


def scalings_without_length(config: Any) -> set[str]:
    """Scalings of a config that does not say how many tokens it was trained on before them.

    Those whose formulas have that length in them are left out: there it is an error.
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
    """Tokens that a config promises: the largest of what it and its scaling say."""
    lengths = [layer.geometry.trained_length for layer in layers.values()]
    found = getattr(config, "max_position_embeddings", None)
    if isinstance(found, int):
        lengths.append(found)
    for layer in layers.values():
        original = layer.parameters.get("original_max_position_embeddings")
        factor = layer.parameters.get("factor")
        if layer.scaling in ("yarn", "linear") and original and factor:
            lengths.append(round(original * factor))
    return max(lengths)


def frequency_difference(a: Frequencies, b: Frequencies) -> tuple[int, float]:
    """How many pairs differ beyond rounding, and by how much the farthest does (a ratio above 1).

    The ratio is infinite where one stands still and the other turns.
    """
    count, farthest = 0, 1.0
    for one, other in zip(a.inv_freq.tolist(), b.inv_freq.tolist(), strict=True):
        low, high = sorted((one, other))
        ratio = 1.0 if low == high else (high / low if low else math.inf)
        count += ratio > 1 + 1e-5
        farthest = max(farthest, ratio)
    return count, farthest
