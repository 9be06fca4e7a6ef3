"""Multi-head latent attention: the attention factor (mscale) in the softmax scale.

Heads of multi-head latent attention (MLA) rotate only in part, and cos and sin reach only that
part. So DeepSeek's YaRN multiplies the softmax scale by mscale squared, and leaves cos and sin as
they are (transformers: `mscale_all_dim`). Doing both would apply mscale twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.dynamic import Dynamic
from rope_patch.methods.mixed import Mixed
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.methods.yarn import YaRN
from rope_patch.patching.method_wrappers import ContinuedScaling, MethodWrapper

# Factor for configs whose own factor is 1, under which transformers ignores mscale_all_dim.
_PLACEHOLDER_FACTOR = 2.0


def find_mla_attentions(owner: nn.Module) -> list[Any]:
    """Return the attentions below a module whose softmax scale carries the attention factor."""
    names = {"qk_head_dim", "qk_nope_head_dim", "scaling"}
    return [module for module in owner.modules() if names <= vars(module).keys()]


def filter_by_layer_type(
    attentions: Iterable[Any], config: Any, layer_types: Collection[str | None]
) -> list[Any]:
    """Return the attentions in layers of the given types; None stands for all layers."""
    if None in layer_types:
        return list(attentions)
    return [each for each in attentions if config.layer_types[each.layer_idx] in layer_types]


def base_softmax_scale(attention: Any) -> float:
    """Return the softmax scale of an attention without any scaling of its rotation."""
    return float(attention.qk_head_dim**-0.5)


def built_softmax_scale(attention: Any, config: Any) -> float:
    """Return the softmax scale that transformers gives an attention when it builds one anew.

    Args:
        attention: One of `find_mla_attentions`.
        config: The text config to read.
    """
    with torch.device("meta"):
        return float(type(attention)(config, attention.layer_idx).scaling)


def config_mscale(attention: Any, config: Any) -> float:
    """Return sqrt(scale(config) / base scale): the mscale that transformers puts into this softmax.

    Not every architecture and release reads `mscale_all_dim`, so a probe module decides.

    Args:
        attention: One of `find_mla_attentions`.
        config: The text config to read.
    """
    return math.sqrt(built_softmax_scale(attention, config) / base_softmax_scale(attention))


@dataclass(frozen=True, kw_only=True)
class SoftmaxScaled(MethodWrapper):
    """A method whose attention factor goes into the softmax scale.

    cos and sin keep the attention factor of the base, which may be a scaling of the config's own.
    A YaRN that continues the config's has its attention factor where the config's has it.

    Attributes:
        own_mscale: mscale that the base has in its softmax scale already.
    """

    own_mscale: float = 1.0

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        inner = self.inner.frequencies(geometry, seq_len)
        if continued := self._continued_mscales(geometry, seq_len):
            return Frequencies(inner.inv_freq, continued[0])
        both = self._deepseek_mscales(geometry, seq_len)
        return Frequencies(inner.inv_freq, geometry.attention_factor * (both[0] if both else 1.0))

    def softmax_mscale(self, geometry: Geometry, seq_len: float | None = None) -> float:
        """Return the total mscale; its square multiplies the softmax scale.

        Args:
            geometry: The unextended rotation.
            seq_len: See `Method.frequencies`.
        """
        if continued := self._continued_mscales(geometry, seq_len):
            return continued[1]
        both = self._deepseek_mscales(geometry, seq_len)
        if both:
            return self.own_mscale * both[1]
        requested = self._requested_method.frequencies(geometry, seq_len)
        return self.own_mscale * requested.attention_factor

    def softmax_mscale_at(self, geometry: Geometry, length: float) -> float:
        """Return the total mscale of a sequence of `length` tokens."""
        valid_until = self.valid_until(length, geometry.trained_length)
        return self.softmax_mscale(geometry, None if math.isinf(valid_until) else valid_until)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        parameters = self.inner.rope_parameters(geometry)
        if not self.has_config_form:
            return parameters
        sharpening = self.softmax_mscale(geometry)
        if sharpening != 1 and not parameters.get("factor", 1) > 1:
            if parameters["rope_type"] != "longrope":
                parameters = super().rope_parameters(geometry)
            parameters["factor"] = _PLACEHOLDER_FACTOR  # without effect beside an attention_factor
        cos_sin_factor = self.frequencies(geometry).attention_factor
        if "attention_factor" in parameters or parameters["rope_type"] == "yarn":
            parameters["attention_factor"] = cos_sin_factor
        if sharpening != 1:
            parameters["mscale_all_dim"] = (sharpening - 1) / (
                yarn_mscale(parameters["factor"]) - 1
            )
            if parameters["rope_type"] == "yarn" and cos_sin_factor == 1:
                # The form of DeepSeek's configs, which all engines read.
                del parameters["attention_factor"]
                parameters["mscale"] = parameters["mscale_all_dim"]
        return parameters

    @property
    def _requested_method(self) -> Method:
        """Return the requested method, below all wrappers."""
        return self.inner.inner if isinstance(self.inner, MethodWrapper) else self.inner

    def _continued_mscales(
        self, geometry: Geometry, seq_len: float | None = None
    ) -> tuple[float, float] | None:
        """Return mscale for cos and sin, and for the softmax, of a YaRN that continues another."""
        wrapper = self.inner
        if not isinstance(wrapper, ContinuedScaling):
            return None
        yarn = wrapper.continued_yarn(geometry)
        if yarn is None:
            return None
        if seq_len is not None and isinstance(yarn, Dynamic | Mixed):
            share = seq_len / geometry.trained_length
            if share <= 1:
                return geometry.attention_factor, self.own_mscale
            if isinstance(yarn, Dynamic):
                own_factor = wrapper.own_parameters[geometry.layer_type]["factor"]
                yarn = replace(yarn, factor=yarn.factor_at(own_factor * share))
        if yarn.mscale and yarn.mscale_all_dim:
            return _deepseek_mscales(yarn)
        factor = yarn.cos_sin_factor()
        return (factor, 1.0) if self.own_mscale == 1 else (1.0, factor)

    def _deepseek_mscales(
        self, geometry: Geometry, seq_len: float | None = None
    ) -> tuple[float, float] | None:
        """Return mscale for cos and sin, and for the softmax, if both are named; else None."""
        method = self._requested_method
        if not (isinstance(method, YaRN) and method.mscale and method.mscale_all_dim):
            return None
        ratio = method.factor if seq_len is None else seq_len / geometry.trained_length
        if isinstance(method, Dynamic):
            method = replace(method, factor=method.factor_at(ratio) if ratio > 1 else 1.0)
        elif isinstance(method, Mixed) and ratio <= 1:
            method = replace(method, factor=1.0)
        return (1.0, 1.0) if method.factor == 1 else _deepseek_mscales(method)


def _deepseek_mscales(yarn: YaRN) -> tuple[float, float]:
    """Return mscale for cos and sin, and for the softmax, of a YaRN that names both."""
    return yarn.cos_sin_factor(), yarn_mscale(yarn.factor, yarn.mscale_all_dim or 0.0)
