"""Methods around another method, such as one on top of a config's trained-in scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import original_rope_parameters
from rope_patch.methods.linear import Linear
from rope_patch.methods.mixed import Mixed
from rope_patch.methods.nope import NoPE
from rope_patch.methods.origin import Origin, origin_of
from rope_patch.methods.recorded import Recorded
from rope_patch.methods.temperature import Temperature
from rope_patch.methods.yarn import YaRN
from rope_patch.original_config import original_config
from rope_patch.patching.geometry_selection import (
    continued_frequencies,
    original_geometry,
    total_yarn,
)
from rope_patch.rope_config import ORIGINAL_LENGTH, TEMPERATURE_KEY, by_layer_type, config_rope_type
from rope_patch.trained_yarn import trained_yarn_evidence
from rope_patch.utils.errors import Refused


@dataclass(frozen=True, kw_only=True)
class MethodWrapper(Method):
    """A method that is named, described and saved as its inner method, but rotates otherwise.

    Attributes:
        inner: The wrapped method.
    """

    inner: Method

    def __post_init__(self) -> None:
        # Class attributes that describe the inner method also describe the wrapper.
        names = ("name", "paper", "training", "is_dynamic", "factor_is_option", "factor")
        for name in (*names, "temperature"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def has_config_form(self) -> bool:
        return self.inner.has_config_form

    @property
    def query_temperature(self) -> Temperature | None:
        return self.inner.query_temperature

    @property
    def start_token_count(self) -> int:
        return self.inner.start_token_count

    @property
    def fixed_at_admission(self) -> bool:
        return self.inner.fixed_at_admission

    def valid_until(self, length: float, trained_length: int) -> float:
        return self.inner.valid_until(length, trained_length)

    def options(self) -> dict[str, Any]:
        return self.inner.options()

    def __str__(self) -> str:
        return str(self.inner)


def unwrap(method: Method) -> Method:
    """Return the method below its wrappers."""
    while isinstance(method, MethodWrapper):
        method = method.inner
    return method


def method_origin(method: Method) -> Origin | str | None:
    """Return where a method comes from, below its wrappers; None for ours.

    For recorded frequencies, that is what was recorded of the method that computed them.
    """
    method = unwrap(method)
    return method.origin if isinstance(method, Recorded) else origin_of(type(method))


@dataclass(frozen=True, kw_only=True)
class ContinuedScaling(MethodWrapper):
    """A method that stretches the scaled frequencies the model runs with, not the unscaled ones.

    The geometry holds the frequencies and the attention factor to build on. A model with LongRoPE
    of its own keeps the short factors for short sequences. Layer types without a scaling of their
    own are extended by the inner method alone. YaRN on a YaRN is one YaRN from the original length,
    with the factor of both.

    Attributes:
        own_parameters: The `rope_parameters` of each layer type that starts from its own scaling.
        short_frequencies: Frequencies of these layer types for short sequences, `[R / 2]`, where
            they differ from the geometry's.
        short_length: Tokens up to which a sequence is short.
        scales_attention: Whether `inner` has an attention factor other than 1 at the target, for
            some layer type with short frequencies.
        layer_types_with_stopped_pairs: Layer types in which some pair has frequency 0.
    """

    own_parameters: Mapping[str | None, dict[str, Any]]
    short_frequencies: Mapping[str | None, tuple[float, ...]] = field(default_factory=dict)
    short_length: int = 0
    scales_attention: bool = False
    layer_types_with_stopped_pairs: frozenset[str | None] = frozenset()

    @classmethod
    def wrap_if_needed(
        cls,
        inner: Method,
        geometries: Mapping[str | None, Geometry],
        own_parameters: Mapping[str | None, dict[str, Any]],
    ) -> Method:
        """Return a method for geometries, some of which may build on the model's own scaling.

        Args:
            inner: The method.
            geometries: Geometry of each layer type.
            own_parameters: The config's `rope_parameters` of each layer type.

        Returns:
            `inner` itself if no geometry builds on such a scaling.

        Raises:
            ValueError: Layer types change from their short to their long sets at different lengths.
        """
        running = {
            layer_type: geometry for layer_type, geometry in geometries.items() if geometry.base
        }
        if not running:
            return inner
        short: dict[str | None, tuple[float, ...]] = {}
        lengths: dict[str | None, int] = {}
        for layer_type, geometry in running.items():
            parameters = own_parameters[layer_type]
            if isinstance(inner, NoPE) or config_rope_type(parameters) != "longrope":
                continue  # without rotation there are no short and long frequencies
            if parameters["short_factor"] != parameters["long_factor"]:
                stretch = torch.tensor(
                    parameters["short_factor"], dtype=torch.float64, device="cpu"
                )
                short[layer_type] = tuple((geometry.unscaled_inv_freq() / stretch).tolist())
                lengths[layer_type] = int(parameters["original_max_position_embeddings"])
        if len(set(lengths.values())) > 1:
            got = ", ".join(f"{layer_type}: {length:,}" for layer_type, length in lengths.items())
            raise Refused(
                "layer types with a LongRoPE of their own must change from the short to the long "
                f"set at one length, original_max_position_embeddings, got {got} tokens in the "
                "config; name those to extend with layer_types=[...], or use start='unscaled'"
            )
        reached = {
            layer_type: inner.frequencies(geometry) for layer_type, geometry in running.items()
        }
        return cls(
            inner=inner,
            own_parameters={layer_type: own_parameters[layer_type] for layer_type in running},
            short_frequencies=short,
            short_length=max(lengths.values(), default=0),
            scales_attention=any(reached[layer_type].attention_factor != 1 for layer_type in short),
            layer_types_with_stopped_pairs=frozenset(
                layer_type for layer_type, r in reached.items() if bool((r.inv_freq == 0).any())
            ),
        )

    def continued_yarn(self, geometry: Geometry) -> YaRN | None:
        """Return the one YaRN that continues the config's, or None if the method continues none."""
        parameters = self.own_parameters.get(geometry.layer_type)
        if not isinstance(self.inner, YaRN) or parameters is None:
            return None
        is_yarn = config_rope_type(parameters) == "yarn"
        return total_yarn(self.inner, parameters) if is_yarn else None

    @property
    def has_config_form(self) -> bool:
        if isinstance(self.inner, NoPE):
            return self.inner.has_config_form
        if not self.inner.has_config_form or self.inner.is_dynamic:
            return False
        if not all(
            self._is_proportional(layer_type) for layer_type in self.layer_types_with_stopped_pairs
        ):
            return False
        if self.inner.is_length_dependent(1):  # mixed windows, LongRoPE of two sets
            # A config holds two sets of frequencies, not three, and one original length.
            return not self.short_frequencies and not any(
                TEMPERATURE_KEY in parameters for parameters in self.own_parameters.values()
            )
        return not self.scales_attention

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        if not geometry.base:
            return self.inner.frequencies(geometry, seq_len)
        short = self.short_frequencies.get(geometry.layer_type)
        if short and seq_len is not None and seq_len <= self.short_length:
            inv_freq = torch.tensor(short, dtype=torch.float64, device="cpu")
            return Frequencies(inv_freq, geometry.attention_factor)
        if isinstance(self.inner, YaRN) and self.continued_yarn(geometry):
            parameters = self.own_parameters[geometry.layer_type]
            return continued_frequencies(self.inner, geometry, parameters, seq_len)
        changed = self.inner.frequencies(geometry, seq_len)
        return Frequencies(changed.inv_freq, changed.attention_factor * geometry.attention_factor)

    def valid_until(self, length: float, trained_length: int) -> float:
        if length <= self.short_length:
            return float(self.short_length)
        return self.inner.valid_until(length, trained_length)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return `longrope` with the stretch of both scalings.

        Return the config's own parameters if no config expresses the stretch.
        """
        if not geometry.base:  # a layer type without trained-in scaling
            return self.inner.rope_parameters(geometry)
        layer_type = geometry.layer_type
        if not self.has_config_form:
            return dict(self.own_parameters[layer_type])
        if isinstance(self.inner, NoPE):
            if geometry.attention_factor == 1:
                return self.inner.rope_parameters(geometry)
            return super().rope_parameters(geometry)  # `proportional` would set the factor to 1
        if self._is_proportional(layer_type):
            factor = float(self.own_parameters[layer_type].get("factor") or 1.0) * self.inner.factor
            return {**self.own_parameters[layer_type], "factor": factor}
        yarn = self.continued_yarn(geometry)
        if yarn is not None and not isinstance(yarn, Mixed):
            start = original_geometry(geometry, self.own_parameters[layer_type])
            return yarn.rope_parameters(start)
        own = self.own_parameters[layer_type]
        reached = self.frequencies(geometry)
        short, switches = reached.inv_freq, layer_type in self.short_frequencies
        if switches or self.inner.is_length_dependent(geometry.trained_length):
            until = self.short_length if switches else geometry.trained_length
            short = self.frequencies(geometry, until).inv_freq
        return {
            "rope_type": "longrope",
            "factor": float(self.factor),
            "long_factor": (geometry.unscaled_inv_freq() / reached.inv_freq).tolist(),
            "short_factor": (geometry.unscaled_inv_freq() / short).tolist(),
            "attention_factor": float(reached.attention_factor),
            **original_rope_parameters(geometry),
            **({"original_max_position_embeddings": self.short_length} if switches else {}),
            **{
                key: own[key] for key in (ORIGINAL_LENGTH,) if TEMPERATURE_KEY in own and key in own
            },
        }

    def _is_proportional(self, layer_type: str | None) -> bool:
        own = config_rope_type(self.own_parameters[layer_type])
        static = isinstance(self.inner, Linear) and not isinstance(self.inner, Mixed)
        return own == "proportional" and static

    def __str__(self) -> str:
        scalings = dict.fromkeys(
            config_rope_type(parameters) for parameters in self.own_parameters.values()
        )
        names = " and ".join(scalings)
        if isinstance(self.inner, YaRN) and names == "yarn":
            return f"{self.inner}, continuing the config's own yarn"
        return f"{self.inner} on the config's own {names}"


def describe_start(config: Any, geometries: dict[str | None, Geometry]) -> list[str]:
    """Return lines on the fate of the config's own scaling, for each layer type."""
    own_parameters = by_layer_type(config.rope_parameters)
    lines = []
    for layer_type, geometry in geometries.items():
        if (own := config_rope_type(own_parameters[layer_type])) == "default":
            continue
        where = "" if layer_type is None else f"{layer_type}: "
        lines.append(
            f"  {where}starts from "
            + (
                f"what the model runs with, the config's own {own}, at its full length"
                if geometry.base
                else f"the unscaled frequencies, in the place of the config's own {own}"
            )
            + f" ({geometry.trained_length:,} tokens)"
        )
        if yarn := describe_yarn(config, layer_type):
            lines.append(f"  {where}{yarn}")
    return lines


def describe_yarn(config: Any, layer_type: str | None) -> str | None:
    """Return a phrase on a config's YaRN: its lengths, and whether it was trained in and why.

    Args:
        config: The text config.
        layer_type: The layer type.

    Returns:
        None if the config has no YaRN. For a config that was saved with a patch, the YaRN is the
        one before the patch.
    """
    original = original_config(config)
    parameters = by_layer_type(original.rope_parameters)[layer_type]
    if config_rope_type(parameters) != "yarn":
        saved = by_layer_type(config.rope_parameters)[layer_type]
        if original is config or config_rope_type(saved) != "yarn":
            return None
        return "the config's yarn was put on by rope_patch, which saved it"
    evidence = trained_yarn_evidence(original, parameters)
    length = parameters.get("original_max_position_embeddings")
    return (
        "the config's own yarn"
        + ("" if original is config else ", before rope_patch extended and saved it")
        + f": ×{parameters['factor']:g}"
        + (f" from {length:,} tokens, " if length else ", ")
        + (f"trained in ({evidence})" if evidence else "put on: nothing says it was trained in")
    )
