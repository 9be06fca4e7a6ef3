"""What an engine was asked for, on a model without a patch, and rotations that differ from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rope_patch.entry_points import patch_rotation
from rope_patch.extension import Extension
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import Rotation
from rope_patch.methods.yarn import YaRN
from rope_patch.patching import Patch
from rope_patch.patching.architecture.mla_scale import (
    SoftmaxScaled,
    config_mscale,
    find_mla_attentions,
)
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.architecture.rotary_traits import (
    RotaryTraits,
    build_rotary,
    call_rotary,
    probe_frequencies,
    reference_frequencies,
)
from rope_patch.patching.geometry_selection import base_geometries, read_yarn
from rope_patch.patching.kernels.eligibility import RotationSite, inspect_site
from rope_patch.patching.method_wrappers import ContinuedScaling, MethodWrapper, unwrap
from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.utils.errors import Refused

# Fields of `rope_parameters` by type: layer type, then field.
Changes = Mapping[str | None, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class AskedRotation:
    """What an engine was asked for, on a model without a patch.

    Attributes:
        extension: The request; None to ask for the checkpoint's own rotation.
        handle: The patch that the request makes, undone; None without a request.
        config: The text config without a patch.
        traits: Facts about the rotary modules.
        geometries: The unextended rotation of every layer type.
        changed: The layer types that the request extends; without one, those that the config
            scales, or all.
    """

    extension: Extension | None
    handle: Patch | None
    config: Any
    traits: list[RotaryTraits]
    geometries: dict[str | None, Geometry]
    changed: tuple[str | None, ...]

    @classmethod
    def of(cls, model: nn.Module, extension: Extension | None) -> AskedRotation:
        """Return what is asked for of a model that is not patched.

        Args:
            model: The model.
            extension: The request; None for the checkpoint's own rotation.

        Raises:
            ValueError: The model does not rotate, or the request cannot be met.
        """
        rotaries = find_rotaries(model)
        handle = None
        if extension is not None:
            with patch_rotation(model, replace(extension, kernels="hf")) as handle:
                pass
            extension = replace(handle.extension, kernels="hf")
        config: Any = handle.original_config if handle else rotaries[0].module.config
        traits = [RotaryTraits.of(model, rotary, config) for rotary in rotaries]
        known = [name for name in by_layer_type(config.rope_parameters) if name is not None]
        trained = handle.trained_length if handle else None
        geometries = _geometries(config, rotaries, trained, known)
        if handle is not None:
            geometries |= handle.geometries
        scaled = [
            layer_type
            for layer_type, parameters in by_layer_type(config.rope_parameters).items()
            if layer_type in geometries and is_scaled(parameters)
        ]
        changed = tuple(handle.geometries if handle else scaled or geometries)
        return cls(extension, handle, config, traits, geometries, changed)

    @property
    def method(self) -> Method | None:
        """Return the method with its options; None without a request."""
        return None if self.handle is None else self.handle.method

    @property
    def name(self) -> str:
        """Return what is asked for, for messages."""
        return "the checkpoint's own rotation" if self.handle is None else str(self.handle)

    @property
    def trained_length(self) -> int:
        """Return the tokens of pretraining."""
        return next(iter(self.geometries.values())).trained_length

    @property
    def target_length(self) -> int:
        """Return the tokens that the engine should read; twice the trained ones if unlimited."""
        if self.handle is not None:
            return self.handle.length or 2 * self.trained_length
        return max(self.trained_length, self.config.max_position_embeddings or 0)

    @property
    def factor(self) -> float:
        """Return target length / trained length."""
        return self.target_length / self.trained_length

    @property
    def is_length_dependent(self) -> bool:
        """Return whether the rotation asked for depends on the length of each sequence."""
        if self.handle is not None:
            return self.handle.is_length_dependent
        return self._own_follows_length

    @property
    def _own_follows_length(self) -> bool:
        """Return whether transformers updates the checkpoint's own rotation by the length."""
        parameters = by_layer_type(self.config.rope_parameters).values()
        return any(config_rope_type(each) in ("dynamic", "longrope") for each in parameters)

    @property
    def is_own_scaled(self) -> bool:
        """Return whether the checkpoint's config scales the layer types that change."""
        parameters = by_layer_type(self.config.rope_parameters)
        return any(is_scaled(parameters[each]) for each in self.changed)

    @cached_property
    def rotation_sites(self) -> list[RotationSite]:
        """Return the attentions that rotate by each of the rotary modules."""
        return [inspect_site(traits) for traits in self.traits]

    @property
    def has_two_pairings(self) -> bool:
        """Return whether this model can be run with its elements paired in the other way."""
        return all(site.problem is None for site in self.rotation_sites)

    def yarn(self, layer_type: str | None) -> YaRN | None:
        """Return the YaRN asked for in a layer type, as one from the original length; None if none.

        Args:
            layer_type: One of those that change.
        """
        if self.method is None:
            parameters = by_layer_type(self.config.rope_parameters)[layer_type]
            return read_yarn(parameters) if config_rope_type(parameters) == "yarn" else None
        method = self.method
        if isinstance(method, SoftmaxScaled):
            method = method.inner
        if isinstance(method, ContinuedScaling):
            continued = method.continued_yarn(self.geometries[layer_type])
            if continued is not None:
                return continued
        method = unwrap(method)
        return method if isinstance(method, YaRN) else None

    def own_rotation(self, changes: Changes | None = None) -> Rotation:
        """Return the rotation that transformers computes from the checkpoint's config.

        One that follows the length is that of a short text.

        Args:
            changes: Fields of `rope_parameters` that differ, by layer type.
        """
        if changes is None:
            return self._own_rotation
        config = copy.deepcopy(self.config)
        for layer_type, parameters in by_layer_type(config.rope_parameters).items():
            parameters.update(changes.get(layer_type, {}))
        return self._rotation_of(config)

    @cached_property  # most hypotheses begin with it, and are compared with one another
    def _own_rotation(self) -> Rotation:
        return self._rotation_of(self.config)

    def _rotation_of(self, config: Any) -> Rotation:
        frequencies: dict[str | None, Frequencies] = {}
        for traits in self.traits:
            frequencies |= reference_frequencies(traits.rotary, config)
        return Rotation(frequencies, self._config_mscale(config))

    def _own_rotation_at(self, length: int) -> Rotation:
        """Return the config's rotation as transformers updates it for a text of some tokens."""
        own = self.own_rotation()
        frequencies = dict(own.frequencies)
        for traits in self.traits:
            if not traits.is_buffer_used:
                frequencies |= reference_frequencies(traits.rotary, self.config, length)
                continue
            module = build_rotary(traits.rotary, self.config)
            for layer_type in traits.frequencies:
                call_rotary(module, torch.zeros(1), torch.tensor([[0, length - 1]]), layer_type)
            frequencies |= probe_frequencies(module, traits.rotary)
        return Rotation(frequencies, own.softmax_mscale)

    def unscaled(self) -> Rotation:
        """Return the rotation of every layer by its theta alone."""
        own = self.own_rotation().frequencies
        parameters = by_layer_type(self.config.rope_parameters)
        return Rotation(
            {
                layer_type: Frequencies(self.geometries[layer_type].unscaled_inv_freq())
                if layer_type in self.changed or is_scaled(parameters[layer_type])
                else each
                for layer_type, each in own.items()
            }
        )

    def asked(self, length: int) -> Rotation:
        """Return the rotation asked for, of a sequence of `length` tokens."""
        own = self.own_rotation()
        if self.handle is None:
            return self._own_rotation_at(length) if self._own_follows_length else own
        frequencies = own.frequencies | self.handle.frequencies_at(length)
        return Rotation(frequencies, self._mscale(self.handle.method, length))

    def by_method(
        self,
        method: Method,
        length: int,
        geometries: dict[str | None, Geometry] | None = None,
    ) -> Rotation:
        """Return the rotation by another method, or from other geometries.

        Args:
            method: The method.
            length: Tokens in the sequence.
            geometries: The unextended rotation of the layer types to change; those that the
                request changes unless given.
        """
        geometries = geometries or {each: self.geometries[each] for each in self.changed}
        own = self.own_rotation()
        frequencies = own.frequencies | {
            layer_type: method.frequencies_at(geometry, length)
            for layer_type, geometry in geometries.items()
            if layer_type in own.frequencies
        }
        return Rotation(frequencies, self._mscale(method, length))

    def wrapped(self, method: Method) -> Method:
        """Return another method, wrapped for MLA models as the one asked for."""
        mine = self.method
        return replace(mine, inner=method) if isinstance(mine, SoftmaxScaled) else method

    def _mscale(self, method: Method, length: int) -> float:
        if not isinstance(method, SoftmaxScaled):
            return 1.0
        return method.softmax_mscale_at(self.geometries[self.changed[0]], length)

    def _config_mscale(self, config: Any) -> float:
        attentions = [each for t in self.traits for each in find_mla_attentions(t.owner)]
        return config_mscale(attentions[0], config) if attentions else 1.0


def with_options(method: Method, **options: Any) -> Method:
    """Return a method with other options, below its wrappers."""
    if isinstance(method, MethodWrapper):
        return replace(method, inner=with_options(method.inner, **options))
    return replace(method, **options)


def _geometries(
    config: Any, rotaries: list[Any], trained: int | None, known: list[str]
) -> dict[str | None, Geometry]:
    """Return the unscaled geometries; the running ones where a config hides its original length."""
    layer_types = known or None
    try:
        return base_geometries(config, rotaries, trained, layer_types, "unscaled")
    except Refused:
        return base_geometries(config, rotaries, trained, layer_types, "running")


def is_scaled(parameters: dict[str, Any]) -> bool:
    """Return whether `rope_parameters` of one layer type scale its frequencies."""
    return config_rope_type(parameters) not in ("default", "proportional")
