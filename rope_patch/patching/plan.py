"""Resolve a request to a patch plan that can be applied. Changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method, build
from rope_patch.methods.base import require_number, require_tokens
from rope_patch.methods.registry import get_method
from rope_patch.patching.architecture.probe import reference_frequencies, require_buffer_is_used
from rope_patch.patching.architecture.rotary_modules import (
    RotaryModule,
    find_decoder,
    find_owner,
    find_rotaries,
)
from rope_patch.patching.dynamic.hooks import LengthHooks
from rope_patch.patching.kernels.eligibility import RotationSite, inspect_site, require_kernels
from rope_patch.patching.method_wrappers import ContinuedScaling
from rope_patch.patching.mla_scale import (
    SoftmaxScaled,
    config_mscale,
    filter_by_layer_type,
    find_mla_attentions,
)
from rope_patch.patching.start_tokens import require_start_tokens_supported
from rope_patch.rope_config import (
    LONGROPE_ONLY,
    by_layer_type,
    config_rope_type,
    extends_scaled_frequencies,
    read_geometries,
)
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
    # Of rope types that rope_patch.register adds.
    "new_theta",
    "growth",
}


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """A request that was checked and can be applied.

    Attributes:
        method: The method with its options.
        length: Target length in tokens; None if the method follows every length and the request
            names no largest one.
        geometries: The unextended rotation of each layer type that changes (None: all layers).
        unchanged_layer_types: The layer types that stay as they are.
        config: The text config of the unpatched model.
        rotaries: The modules to change, each with its unpatched frequencies.
        length_hooks: For length-dependent frequencies: decoder, rotary module and their hooks.
        kernels: Which code rotates; see `patch`.
        rotation_sites: The rotations that our kernels may compute.
        mla_attentions: The attentions with mscale in their softmax scale (`SoftmaxScaled`).
    """

    method: Method
    length: int | None
    geometries: dict[str | None, Geometry]
    unchanged_layer_types: list[str]
    config: Any
    rotaries: list[tuple[RotaryModule, dict[str | None, Frequencies]]]
    length_hooks: list[tuple[nn.Module, RotaryModule, LengthHooks]] = field(default_factory=list)
    kernels: str = "auto"
    rotation_sites: list[RotationSite] = field(default_factory=list)
    mla_attentions: list[nn.Module] = field(default_factory=list)

    @property
    def trained_length(self) -> int:
        """Return the tokens that the model was trained on at once."""
        return next(iter(self.geometries.values())).trained_length

    @property
    def softmax_mscale(self) -> float:
        """Return mscale, whose square multiplies the softmax scale; 1 without `SoftmaxScaled`."""
        if not isinstance(self.method, SoftmaxScaled):
            return 1.0
        return self.method.softmax_mscale(next(iter(self.geometries.values())))

    @property
    def is_dynamic(self) -> bool:
        """Return whether the rotation changes with the sequence at every length."""
        return self.method.is_dynamic and bool(self.length_hooks)

    def frequencies(self, length: float | None = None) -> dict[str | None, Frequencies]:
        """Return the frequencies of each layer type that changes, for sequences of `length` tokens.

        At the target length unless another is given; at the trained one if there is no target.
        """
        length = length or self.length or self.trained_length
        return {
            layer_type: self.method.frequencies_at(g, length)
            for layer_type, g in self.geometries.items()
        }

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


def make_plan(
    model: nn.Module,
    config: Any,
    method: str,
    *,
    factor: float | None,
    length: int | None,
    trained_length: int | None,
    layer_types: list[str] | None,
    kernels: str,
    start: str,
    options: dict[str, Any],
) -> PatchPlan:
    """Check a request against a model and return its plan; see `patch` for the arguments.

    Args:
        model: The model.
        config: The text config of the unpatched model, if the model is patched; else None.

    Raises:
        ValueError: The request cannot be met, or would change nothing.
        TypeError: A value of the wrong type.
    """
    require_kernels(kernels, [])
    rotaries = find_rotaries(model)
    config = config or rotaries[0].module.config
    if trained_length is not None:
        require_tokens("trained_length", trained_length)
    all_geometries = read_geometries(config, trained_length, start)  # first, for its error messages
    before = [(rotary, reference_frequencies(rotary, config)) for rotary in rotaries]
    geometries = {
        layer_type: resolve_base(geometry, before, config, start)
        for layer_type, geometry in select_layer_types(all_geometries, layer_types, config).items()
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
    options, target_length = resolve_options(method, factor, length, trained, options)
    resolved = build(method, **options)
    own_parameters = by_layer_type(config.rope_parameters)
    resolved = ContinuedScaling.wrap_if_needed(resolved, geometries, own_parameters)
    sharpened = [m for rotary in rotaries for m in find_mla_attentions(find_owner(model, rotary))]
    sharpened = filter_by_layer_type(sharpened, config, geometries)
    if sharpened:
        running = any(geometry.base for geometry in geometries.values())
        own = config_mscale(sharpened[0], config) if running else 1.0
        resolved = SoftmaxScaled(inner=resolved, own_mscale=own)
    plan = PatchPlan(
        method=resolved,
        length=target_length,
        geometries=geometries,
        unchanged_layer_types=[
            str(layer_type) for layer_type in all_geometries if layer_type not in geometries
        ],
        config=config,
        rotaries=before,
        kernels=kernels,
        mla_attentions=sharpened,
    )
    for rotary, own_frequencies in before:
        require_buffer_is_used(rotary, config, own_frequencies)
    _require_known_rotation(plan)
    _require_change(plan)
    require_start_tokens_supported(model, resolved, target_length, geometries, before, config)
    if plan.method.is_length_dependent(trained):
        plan.length_hooks.extend(_make_length_hooks(model, plan))
    if kernels != "hf":
        plan.rotation_sites.extend(
            inspect_site(model, rotary, config, _start_tokens_of(plan, rotary))
            for rotary in rotaries
        )
        require_kernels(kernels, plan.rotation_sites)
    return plan


def resolve_options(
    method: str,
    factor: float | None,
    length: int | None,
    trained: int,
    options: dict[str, Any],
) -> tuple[dict[str, Any], int | None]:
    """Merge factor and length into a method's other options.

    A dynamic method needs neither. The length is then the largest one expected. The factor is
    another way to give it, unless it is part of the method's formula (`dynamic`).

    Args:
        method: A method's name.
        factor: The requested factor, if any.
        length: The requested length in tokens, if any.
        trained: The trained length, in tokens.
        options: The method's other options.

    Returns:
        All options, and the target length in tokens or None.

    Raises:
        ValueError: Not exactly one of factor and length, where that is needed.
    """
    method_class = get_method(method)
    if not method_class.is_dynamic:
        factor, length = resolve_factor_and_length(factor, length, trained)
        return {"factor": factor, **options}, length
    if method_class.factor_is_option and factor is not None:
        require_number("factor", factor)
        options = {"factor": float(factor), **options}
        factor = None if length is not None or factor <= 1 else factor
    if factor is None and length is None:
        return options, None
    factor, length = resolve_factor_and_length(factor, length, trained)
    if factor < 1:
        raise Refused(f"factor must be at least 1 (largest length / trained length), got {factor}")
    return options, length


def resolve_factor_and_length(
    factor: float | None, length: int | None, trained: int
) -> tuple[float, int]:
    """Return factor and target length (tokens) from exactly one of them, or raise ValueError."""
    if (factor is None) == (length is None):
        got = "neither" if factor is None else f"factor={factor} and length={length}"
        raise Refused(
            f"expected exactly one of factor and length, got {got}; for example factor=4, or "
            f"length={4 * trained}"
        )
    if factor is not None:
        require_number("factor", factor)
        if not math.isfinite(factor * trained):
            raise Refused(f"factor must be a ratio of two lengths in tokens, got {factor:g}")
        return float(factor), round(factor * trained)
    require_tokens("length", length)
    assert length is not None
    if length < trained:
        raise Refused(
            f"length must be at least the trained length, {trained:,} tokens, got {length:,}"
        )
    return length / trained, int(length)


def select_layer_types(
    geometries: dict[str | None, Geometry], layer_types: list[str] | None, config: Any
) -> dict[str | None, Geometry]:
    """Return the geometries that a request changes; raise ValueError for an unknown layer type."""
    known = [layer_type for layer_type in geometries if layer_type is not None]
    if layer_types is None:
        # Layers with a window never meet a distance that they were not trained on.
        far = [
            layer_type
            for layer_type in known
            if "sliding" not in layer_type and "chunked" not in layer_type
        ]
        return {layer_type: geometries[layer_type] for layer_type in far or geometries}
    if not layer_types or not set(layer_types) <= set(known):
        has = f"has the layer types {', '.join(known)}" if known else "rotates all layers alike"
        raise Refused(
            f"layer_types={layer_types!r} does not fit: {type(config).__name__} {has}"
            + ("" if known else "; leave layer_types out")
        )
    return {layer_type: geometries[layer_type] for layer_type in layer_types}


def resolve_base(
    geometry: Geometry,
    before: list[tuple[RotaryModule, dict[str | None, Frequencies]]],
    config: Any,
    start: str,
) -> Geometry:
    """Return a geometry with the architecture's own dimensions, and the base that `start` selects.

    Configs spell the number of rotated pairs in several ways, so transformers' module decides it.
    """
    layer_type = geometry.layer_type
    reference = next(
        (frequencies[layer_type] for _, frequencies in before if layer_type in frequencies), None
    )
    if reference is None:
        raise Refused(f"{type(config).__name__} names {layer_type!r}, but no module rotates by it")
    rotary_dim = 2 * len(reference.inv_freq)
    sized = replace(geometry, rotary_dim=rotary_dim, head_dim=max(geometry.head_dim, rotary_dim))
    parameters = by_layer_type(config.rope_parameters)[layer_type]
    if not extends_scaled_frequencies(parameters, start):
        return sized
    running = reference.inv_freq
    if config_rope_type(parameters) == "longrope":  # the module starts with the short factors
        stretch = torch.tensor(parameters["long_factor"], dtype=torch.float64, device="cpu")
        running = sized.unscaled_inv_freq() / stretch
    return replace(sized, base=tuple(running.tolist()), attention_factor=reference.attention_factor)


def _require_known_rotation(plan: PatchPlan) -> None:
    """Raise if an architecture's plain rotation is not the one that its config describes."""
    for rotary, before in plan.rotaries:
        for layer_type in before.keys() & plan.geometries.keys():
            parameters = by_layer_type(plan.config.rope_parameters)[layer_type]
            if config_rope_type(parameters) != "default":
                continue
            geometry = plan.geometries[layer_type]
            expected, got = geometry.inv_freq(), before[layer_type].inv_freq
            if expected.shape != got.shape or not torch.allclose(expected, got, rtol=1e-5, atol=0):
                raise Refused(
                    f"{type(rotary.module).__name__} does not rotate as its config says: expected "
                    f"{geometry.rotary_dim} dimensions with theta {geometry.theta:g}; this "
                    "architecture is not supported yet"
                )


def _require_change(plan: PatchPlan) -> None:
    # Dynamic methods change nothing up to the trained length.
    lengths = (plan.trained_length, plan.trained_length + 1, plan.length)
    for frequencies in [plan.frequencies(length) for length in lengths]:
        for layer_type, after in frequencies.items():
            if any(layer_type in b and not b[layer_type].close_to(after) for _, b in plan.rotaries):
                return
    for attention in plan.mla_attentions:
        if abs(config_mscale(attention, plan.config) - plan.softmax_mscale) > 1e-6:
            return
    raise Refused(
        f"{plan.method} would change nothing: the model already rotates that way; expected a "
        "method and a factor that change at least one frequency"
    )


def _start_tokens_of(plan: PatchPlan, rotary: RotaryModule) -> int:
    """Return how many first positions of a rotary module keep the base rotation."""
    changes = rotary.prefixes.keys() & plan.geometries.keys()
    return plan.method.start_token_count if changes else 0


def _make_length_hooks(
    model: nn.Module, plan: PatchPlan
) -> list[tuple[nn.Module, RotaryModule, LengthHooks]]:
    hooks: list[tuple[nn.Module, RotaryModule, LengthHooks]] = []
    for rotary, before in plan.rotaries:
        if not rotary.prefixes.keys() & plan.geometries.keys():
            continue
        decoder = find_decoder(model, rotary)
        if any(decoder is other for other, _, _ in hooks):
            raise Refused(
                f"{type(decoder).__name__} has several rotary modules, whose lengths cannot be "
                "followed in one cache yet: use a method whose frequencies stay, such as yarn"
            )
        length_hooks = LengthHooks(
            decoder, rotary, plan.method, plan.geometries, before, plan.config
        )
        hooks.append((decoder, rotary, length_hooks))
    return hooks
