"""Resolve a request to a patch plan that can be applied, and describe a patch. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rope_patch.extension import Extension, is_far
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import require_tokens
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.yarn import YaRN
from rope_patch.original_config import original_config, trained_record
from rope_patch.patching.architecture.mla_scale import (
    SoftmaxScaled,
    config_mscale,
    filter_by_layer_type,
    find_mla_attentions,
)
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_rotaries
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.attention_interception import find_scalable_attentions, own_temperature
from rope_patch.patching.dynamic.hooks import LengthHooks
from rope_patch.patching.geometry_selection import (
    inherit_constants,
    require_no_shrink,
    resolve_base,
    select_layer_types,
)
from rope_patch.patching.kernels.eligibility import RotationSite, inspect_site, require_kernels
from rope_patch.patching.method_wrappers import ContinuedScaling, unwrap
from rope_patch.patching.position_maps.mapped_attention import Site, find_mapped_attentions
from rope_patch.patching.start_tokens import require_start_tokens_supported
from rope_patch.rope_config import LONGROPE_ONLY, by_layer_type, config_rope_type, read_geometries
from rope_patch.utils.errors import Refused

# rope_parameters keys that belong to a scaling; dropped when another one replaces it.
_SCALING_KEYS = {
    "rope_type",
    "type",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    # Keys of the rope types that rope_patch.register_rope_types adds.
    "new_theta",
    "growth",
}


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """A request that was checked and can be applied.

    Attributes:
        extension: The request.
        method: The method with its options.
        length: Target length in tokens; None if the method follows every length and the request
            names no largest one.
        geometries: The unextended rotation of each layer type that changes (None: all layers).
        unchanged_layer_types: The layer types that stay as they are.
        config: The text config that the extension starts from: of the model as it was trained.
        model_config: The text config of the unpatched model, with the record of a saved patch.
        rotaries: Facts about the modules to change.
        length_hooks: For length-dependent frequencies: decoder, rotary module and their hooks.
        rotation_sites: The rotations that our kernels may compute.
        mla_attentions: The attentions with mscale in their softmax scale (`SoftmaxScaled`).
        temperature_sites: The attentions whose queries have a temperature, by rotary module.
        mapped_sites: The attentions that compare at mapped positions, by rotary module.
    """

    extension: Extension
    method: Method
    length: int | None
    geometries: dict[str | None, Geometry]
    unchanged_layer_types: list[str]
    config: Any
    model_config: Any
    rotaries: list[RotaryTraits]
    length_hooks: list[tuple[nn.Module, RotaryModule, LengthHooks]] = field(default_factory=list)
    rotation_sites: list[RotationSite] = field(default_factory=list)
    mla_attentions: list[Any] = field(default_factory=list)
    temperature_sites: list[tuple[RotaryTraits, list[nn.Module]]] = field(default_factory=list)
    mapped_sites: list[Site] = field(default_factory=list)

    @property
    def position_map(self) -> PositionMap | None:
        """Return the map of positions that the method is; None if it changes frequencies alone."""
        method = unwrap(self.method)
        return method if isinstance(method, PositionMap) else None

    @property
    def longest_mapped_text(self) -> int | None:
        """Return the longest text that a position map serves, in tokens; None if it serves any."""
        if self.position_map is None:
            return None
        longest = self.position_map.longest_text(self.position_map.reach(self.trained_length))
        return None if math.isinf(longest) else math.floor(longest)

    @property
    def trained_length(self) -> int:
        """Return the tokens that the model was trained on at once."""
        return next(iter(self.geometries.values())).trained_length

    @property
    def resolved_extension(self) -> Extension:
        """Return the request with what the config and the method's defaults decided made explicit.

        It asks for the same patch whatever a later config or default says.
        """
        options = self.method.options()
        options.pop("factor")
        factor, length = self.extension.factor, self.extension.length
        return replace(
            self.extension,
            factor=None if factor is None else float(factor),
            length=None if length is None else int(length),
            trained_length=self.trained_length,
            layer_types=[name for name in self.geometries if name is not None] or None,
            start="running" if any(g.base for g in self.geometries.values()) else "unscaled",
            anyway=self.length is not None and is_far(self.length, self.trained_length),
            options=options,
        )

    @property
    def softmax_mscale(self) -> float:
        """Return mscale, whose square multiplies the softmax scale; 1 without `SoftmaxScaled`."""
        if not isinstance(self.method, SoftmaxScaled):
            return 1.0
        return self.method.softmax_mscale(next(iter(self.geometries.values())))

    @property
    def shortest_softmax_mscale(self) -> float:
        """Return mscale of the shortest sequences; hooks scale queries for longer ones."""
        if not (isinstance(self.method, SoftmaxScaled) and self.length_hooks):
            return self.softmax_mscale
        return self.method.softmax_mscale_at(next(iter(self.geometries.values())), 1)

    @property
    def is_dynamic(self) -> bool:
        """Return whether the rotation changes with the sequence at every length."""
        return self.method.is_dynamic and bool(self.length_hooks)

    @property
    def depends_on_positions(self) -> bool:
        """Return whether positions themselves count; rotation alone depends on distances."""
        method = self.method
        return bool(method.start_token_count or method.query_temperature or self.position_map)

    def frequencies(self, length: float | None = None) -> dict[str | None, Frequencies]:
        """Return the frequencies of each layer type that changes, for sequences of `length` tokens.

        At the target length unless another is given; at the trained one if there is no target.
        """
        if length is None:
            length = self.trained_length if self.length is None else self.length
        frequencies = {
            layer_type: self.method.frequencies_at(g, length)
            for layer_type, g in self.geometries.items()
        }
        if self.position_map is not None:  # what it leaves alone stays bit for bit
            for traits in self.rotaries:
                for layer_type, own in traits.frequencies.items():
                    if layer_type in frequencies and own.close_to(frequencies[layer_type]):
                        frequencies[layer_type] = own
        return frequencies

    def rope_parameters(self) -> dict[str, Any]:
        """Return the config's `rope_parameters` under the plan."""
        own_parameters = self.config.rope_parameters
        parameters: dict[Any, dict[str, Any]] = {}
        only = (
            self.config.model_type in LONGROPE_ONLY
            and self.method.has_config_form
            and not self.is_dynamic
        )
        for layer_type, geometry in self.geometries.items():
            parameters[layer_type] = self.method.rope_parameters(geometry)
            if only and parameters[layer_type]["rope_type"] not in ("default", "longrope"):
                parameters[layer_type] = Method.rope_parameters(self.method, geometry)
            # Keys that belong to no scaling stay: partial rotation, M-RoPE sections, temperatures.
            for key, value in by_layer_type(own_parameters)[layer_type].items():
                if key not in _SCALING_KEYS:
                    parameters[layer_type].setdefault(key, value)
        return parameters.get(None) or {**own_parameters, **parameters}

    def layer_thetas(self) -> dict[str, list[float]]:
        """Return the config's theta of each layer under the plan, where it names them (Granite)."""
        thetas = getattr(self.config, "layer_rope_theta", None)
        if thetas is None:
            return {}
        theta = self.rope_parameters()["rope_theta"]
        return {"layer_rope_theta": [theta if each else each for each in thetas]}


def make_plan(model: nn.Module, config: Any, extension: Extension) -> PatchPlan:
    """Check a request against a model and return its plan.

    Args:
        model: The model.
        config: The text config of the unpatched model, if the model is patched; else None.
        extension: The request.

    Raises:
        ValueError: The request cannot be met, or would change nothing, or nothing says what it
            starts from.
        TypeError: A value of the wrong type.
    """
    start = extension.start
    require_kernels(extension.kernels, [])
    modules = find_rotaries(model)
    model_config = config or modules[0].module.config
    config = original_config(model_config, start, extension.trained_length)
    if extension.trained_length is not None:
        require_tokens("trained_length", extension.trained_length)
    # First, for its error messages.
    all_geometries = read_geometries(config, extension.trained_length, start)
    rotaries = [RotaryTraits.of(model, rotary, config) for rotary in modules]
    unpatched = [traits.frequencies for traits in rotaries]
    geometries = {
        layer_type: resolve_base(geometry, unpatched, config, start)
        for layer_type, geometry in select_layer_types(
            all_geometries, extension.layer_types, config
        ).items()
    }
    lengths = {layer_type: geometry.trained_length for layer_type, geometry in geometries.items()}
    trained, *others = dict.fromkeys(lengths.values())
    if others:
        got = ", ".join(f"{n:,} tokens for {layer_type}" for layer_type, n in lengths.items())
        raise Refused(
            "layer types that are extended together must start at one length, got "
            f"{got}: patch one of "
            "them (layer_types=...), or name the length (trained_length=...)"
        )
    own_parameters = by_layer_type(config.rope_parameters)
    require_no_shrink(extension, config, geometries, model_config)
    request = inherit_constants(extension, geometries, own_parameters)
    resolved, target_length = request.resolve(trained)
    if isinstance(resolved, PositionMap):
        target_length = mapped_length(resolved, target_length, geometries, own_parameters)
        if resolved.temperature is None and own_temperature(config):
            resolved = replace(resolved, temperature="none")  # the model's own stays
    _require_expressed_start(config, extension, resolved)
    resolved = ContinuedScaling.wrap_if_needed(resolved, geometries, own_parameters)
    sharpened = [module for traits in rotaries for module in find_mla_attentions(traits.owner)]
    sharpened = filter_by_layer_type(sharpened, config, geometries)
    if sharpened:
        running = any(geometry.base for geometry in geometries.values())
        own = config_mscale(sharpened[0], config) if running else 1.0
        resolved = SoftmaxScaled(inner=resolved, own_mscale=own)
    plan = PatchPlan(
        extension=extension,
        method=resolved,
        length=target_length,
        geometries=geometries,
        unchanged_layer_types=[
            str(layer_type) for layer_type in all_geometries if layer_type not in geometries
        ],
        config=config,
        model_config=model_config,
        rotaries=rotaries,
        mla_attentions=sharpened,
    )
    for traits in rotaries:
        if not traits.is_buffer_used:
            raise Refused(
                f"{traits.name} computes its frequencies anew in every forward, so none that are "
                "set on it act: this architecture is not supported"
            )
    _require_known_rotation(plan)
    _require_change(plan)
    require_start_tokens_supported(resolved, target_length, geometries, rotaries)
    if plan.position_map is not None:
        plan.mapped_sites.extend(find_mapped_attentions(rotaries, config, geometries))
    if (temperature := plan.method.query_temperature) is not None:
        temperature.require_trained_length(plan.trained_length)
        plan.temperature_sites.extend(find_scalable_attentions(rotaries, config, geometries))
    if plan.method.is_length_dependent(trained):
        plan.length_hooks.extend(_make_length_hooks(plan))
    if extension.kernels != "hf":
        plan.rotation_sites.extend(
            inspect_site(traits, _start_tokens_of(plan, traits)) for traits in rotaries
        )
        require_kernels(extension.kernels, plan.rotation_sites)
    return plan


def saved_frequencies(traits: RotaryTraits, plan: PatchPlan) -> dict[str | None, Frequencies]:
    """Return trained frequencies of layer types that a saved patch changed and the plan leaves.

    Plain transformers loads them as the saved patch extended them.

    Args:
        traits: One of the plan's rotary modules, unpatched.
        plan: The plan.
    """
    config: Any = traits.rotary.module.config
    saved, original = (by_layer_type(c.rope_parameters) for c in (config, plan.config))
    return {
        layer_type: frequencies
        for layer_type, frequencies in traits.frequencies.items()
        if layer_type not in plan.geometries and saved[layer_type] != original[layer_type]
    }


def _require_expressed_start(config: Any, extension: Extension, method: Method) -> None:
    """Raise if no config states the rotation a model was trained under, and no start is given."""
    record = trained_record(config)
    if record is None or record["rope_parameters"] is not None or extension.start != "auto":
        return
    name, length = record["method"], record["max_position_embeddings"]
    options = {k: v for k, v in method.options().items() if k != "factor"}
    # The request for that very rotation is met: the method with its options, where it needs no
    # factor or names the trained length.
    if (
        method.name == name
        and extension.factor in (None, record["factor"])
        and (extension.length == length or method.is_dynamic)
        and options == record["options"]
    ):
        return
    reach = "" if length is None else f", {length:,} tokens"
    raise Refused(
        f"the model was trained under {name}{reach}, which no config states, so there are no "
        "frequencies to go on from: rope_patch.load(folder) restores that rotation. To replace it, "
        f"pass start='unscaled', and the factor counts from {config.max_position_embeddings:,} "
        "tokens"
    )


def _require_known_rotation(plan: PatchPlan) -> None:
    """Raise if an architecture's plain rotation is not the one that its config describes."""
    for layer_type, geometry in plan.geometries.items():
        thetas = {theta for theta in getattr(plan.config, "layer_rope_theta", None) or () if theta}
        if layer_type is None and thetas - {geometry.theta}:  # Granite SWA: a theta for each layer
            raise Refused(
                f"{type(plan.config).__name__} rotates layers by theta "
                f"{' and '.join(f'{theta:g}' for theta in sorted(thetas))} (layer_rope_theta), "
                f"expected {geometry.theta:g} (rope_parameters) in all: several thetas in one "
                "layer type are not supported yet"
            )
    for traits in plan.rotaries:
        before = traits.frequencies
        for layer_type in before.keys() & plan.geometries.keys():
            parameters = by_layer_type(plan.config.rope_parameters)[layer_type]
            if config_rope_type(parameters) != "default":
                continue
            geometry = plan.geometries[layer_type]
            expected, got = geometry.inv_freq(), before[layer_type].inv_freq
            if expected.shape != got.shape or not torch.allclose(expected, got, rtol=1e-5, atol=0):
                raise Refused(
                    f"{traits.name} does not rotate as its config says: expected "
                    f"{geometry.rotary_dim} dimensions with theta {geometry.theta:g}; this "
                    "architecture is not supported yet"
                )


def _require_change(plan: PatchPlan) -> None:
    if plan.method.query_temperature is not None or plan.position_map is not None:
        return
    # Dynamic methods change nothing up to the trained length.
    lengths = (plan.trained_length, plan.trained_length + 1, plan.length)
    for frequencies in [plan.frequencies(length) for length in lengths]:
        for layer_type, after in frequencies.items():
            for traits in plan.rotaries:
                before = traits.frequencies.get(layer_type)
                if before is not None and not before.close_to(after):
                    return
    for attention in plan.mla_attentions:
        if abs(config_mscale(attention, plan.config) - plan.softmax_mscale) > 1e-6:
            return
    raise Refused(
        f"{plan.method} would change nothing: the model already rotates that way; expected a "
        "method and a factor that change at least one frequency"
    )


def _start_tokens_of(plan: PatchPlan, traits: RotaryTraits) -> int:
    """Return how many first positions of a rotary module keep the base rotation."""
    changes = traits.frequencies.keys() & plan.geometries.keys()
    return plan.method.start_token_count if changes else 0


def _make_length_hooks(plan: PatchPlan) -> list[tuple[nn.Module, RotaryModule, LengthHooks]]:
    hooks: list[tuple[nn.Module, RotaryModule, LengthHooks]] = []
    for traits in plan.rotaries:
        if not traits.frequencies.keys() & plan.geometries.keys():
            continue
        decoder = traits.require_decoder(is_owner=False)
        shared = next((h for other, _, h in hooks if other is decoder), None)
        if shared is not None:  # the modules rotate alike: see `_require_known_rotation`
            shared.rotaries.append(traits.rotary)
            continue
        length_hooks = LengthHooks(traits, plan.method, plan.geometries)
        if plan.method.fixed_at_admission and length_hooks.axes is not None:
            raise Refused(
                f"{type(traits.config).__name__} counts an image as fewer positions than tokens "
                "(M-RoPE), so prompt and max_new_tokens do not say how long a sequence becomes: "
                "use growth='stepped'"
            )
        hooks.append((decoder, traits.rotary, length_hooks))
    return hooks


def mapped_length(
    position_map: PositionMap,
    requested: int | None,
    geometries: Mapping[str | None, Geometry],
    own_parameters: Mapping[str | None, dict[str, Any]],
) -> int | None:
    """Return the length that a position map is planned for; None if it serves any.

    Args:
        position_map: The map.
        requested: The request's length in tokens, if it names one.
        geometries: The rotations that it starts from, all of one length.
        own_parameters: The config's `rope_parameters` of each layer type.

    Raises:
        ValueError: The map's positions do not stay within those that the frequencies reach, or it
            would put a YaRN on the config's own.
    """
    for layer_type, geometry in geometries.items():
        is_scaled = geometry.base and config_rope_type(own_parameters[layer_type]) == "yarn"
        if is_scaled and isinstance(position_map.inner, YaRN):
            raise Refused(
                f"the config has a yarn of its own, and on={position_map.on!r} would put another "
                "one on it: leave `on` out, which maps positions on the config's yarn, or replace "
                "that with start='unscaled'"
            )
    reach = position_map.reach(next(iter(geometries.values())).trained_length)
    longest = position_map.longest_text(reach)
    if requested is not None and requested > longest:
        raise Refused(
            f"{position_map} stays within the {reach:,} positions that its frequencies reach for "
            f"texts of up to {math.floor(longest):,} tokens, and the request is for "
            f"{requested:,}: expected a shorter length, larger groups, or frequencies that reach "
            "further (on='yarn:4')"
        )
    if requested is None and not math.isinf(longest):
        return math.floor(longest)
    return requested
