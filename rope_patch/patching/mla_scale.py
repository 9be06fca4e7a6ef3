"""Multi-head latent attention sharpens in its softmax scale, not in cos and sin.

Its heads have a part that rotates and one that does not, and cos and sin reach only the first. So
DeepSeek's YaRN multiplies the softmax scale by the square of the attention factor, and leaves cos
and sin alone (transformers: `mscale_all_dim`). Both at once would sharpen twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.methods.yarn import YaRN
from rope_patch.patching.method_wrappers import MethodWrapper

# The factor in a config for a sharpening that a factor of 1 cannot say: any other does.
_PLACEHOLDER_FACTOR = 2.0


def find_mla_attentions(owner: nn.Module) -> list[nn.Module]:
    """The attentions below a module whose softmax scale is where sharpening belongs."""
    names = {"qk_head_dim", "qk_nope_head_dim", "scaling"}
    return [module for module in owner.modules() if names <= vars(module).keys()]


def filter_by_layer_type(
    attentions: Iterable[nn.Module], config: Any, layer_types: Collection[str | None]
) -> list[nn.Module]:
    """Those attentions that stand in layers of some types; None is for all layers alike."""
    if None in layer_types:
        return list(attentions)
    return [each for each in attentions if config.layer_types[each.layer_idx] in layer_types]


def base_softmax_scale(attention: Any) -> float:
    """The softmax scale of an attention without any scaling of its rotation."""
    return float(attention.qk_head_dim**-0.5)


def config_mscale(attention: Any, config: Any) -> float:
    """By the square of what transformers multiplies an attention's softmax scale for a config.

    Not every architecture and release reads `mscale_all_dim`, so a module is made and asked.

    Args:
        attention: One of `find_mla_attentions`.
        config: The text config to read.
    """
    with torch.device("meta"):
        made = type(attention)(config, attention.layer_idx)
    return math.sqrt(made.scaling / base_softmax_scale(made))


@dataclass(frozen=True, kw_only=True)
class SoftmaxScaled(MethodWrapper):
    """A method whose attention factor goes into the softmax scale.

    cos and sin keep what the start multiplies them by, a scaling of the config's own perhaps.

    Attributes:
        own_mscale: What the start has in its softmax scale already, as `softmax_mscale` counts.
    """

    own_mscale: float = 1.0

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        found = self.inner.frequencies(geometry, seq_len)
        both = self._deepseek_mscales()
        return Frequencies(found.inv_freq, geometry.attention_factor * (both[0] if both else 1.0))

    def softmax_mscale(self, geometry: Geometry) -> float:
        """By the square of what the softmax scale is multiplied, all in all."""
        both = self._deepseek_mscales()
        if both:
            return self.own_mscale * both[1]
        return self.own_mscale * self._requested_method.frequencies(geometry).attention_factor

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        spelled = self.inner.rope_parameters(geometry)
        if not self.has_config_form:
            return spelled
        sharpening = self.softmax_mscale(geometry)
        if sharpening != 1 and not spelled.get("factor", 1) > 1:
            if spelled["rope_type"] != "longrope":
                spelled = super().rope_parameters(geometry)
            spelled["factor"] = (
                _PLACEHOLDER_FACTOR  # nothing else depends on it, beside an attention_factor
            )
        cos_sin_factor = self.frequencies(geometry).attention_factor
        if "attention_factor" in spelled or spelled["rope_type"] == "yarn":
            spelled["attention_factor"] = cos_sin_factor
        if sharpening != 1:
            spelled["mscale_all_dim"] = (sharpening - 1) / (yarn_mscale(spelled["factor"]) - 1)
            if spelled["rope_type"] == "yarn" and cos_sin_factor == 1:
                # As DeepSeek's configs say it; all engines know this form.
                del spelled["attention_factor"]
                spelled["mscale"] = spelled["mscale_all_dim"]
        return spelled

    @property
    def _requested_method(self) -> Method:
        """The method that was asked for, whatever it starts from."""
        return self.inner.inner if isinstance(self.inner, MethodWrapper) else self.inner

    def _deepseek_mscales(self) -> tuple[float, float] | None:
        """Where the caller named both of YaRN's laws: what it adds to cos and sin, and here."""
        asked = self._requested_method
        if isinstance(asked, YaRN) and asked.mscale and asked.mscale_all_dim:
            return asked.cos_sin_factor(), yarn_mscale(asked.factor, asked.mscale_all_dim)
        return None
