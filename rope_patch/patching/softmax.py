"""Multi-head latent attention sharpens in its softmax scale, not in cos and sin.

Its heads have a part that rotates and one that does not, and cos and sin reach only the first. So
DeepSeek's YaRN multiplies the softmax scale by the square of the attention factor, and leaves cos
and sin alone (transformers: `mscale_all_dim`). Both at once would sharpen twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.ntk_by_parts import attention_law
from rope_patch.methods.yarn import YaRN
from rope_patch.reading import own_scaling


def find_sharpened(owner: nn.Module) -> list[nn.Module]:
    """The attentions below a module whose softmax scale is where sharpening belongs."""
    names = {"qk_head_dim", "qk_nope_head_dim", "scaling"}
    return [module for module in owner.modules() if names <= vars(module).keys()]


def unsharpened(attention: Any) -> float:
    """The softmax scale of an attention without any scaling of its rotation."""
    return float(attention.qk_head_dim**-0.5)


def own_sharpening(parameters: dict[str, Any]) -> float:
    """By the square of what a config's own scaling multiplies the softmax scale."""
    if own_scaling(parameters) == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return attention_law(parameters["factor"], parameters["mscale_all_dim"])


@dataclass(frozen=True, kw_only=True)
class InSoftmax(Method):
    """A method whose attention factor goes into the softmax scale.

    Attributes:
        inner: The method.
        own: What the start has in its softmax scale already.
    """

    inner: Method
    own: float = 1.0

    def __post_init__(self) -> None:
        for name in ("name", "paper", "training", "grows", "factor_in_formula", "factor"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def native(self) -> bool:
        return self.inner.native

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        found = self.inner.frequencies(geometry, seq_len)
        return Frequencies(found.inv_freq, self._both_laws() or 1.0)

    def sharpening(self, geometry: Geometry) -> float:
        """By the square of what the softmax scale is multiplied, all in all."""
        if self._both_laws():
            return self.own * attention_law(self.inner.factor, self.inner.mscale_all_dim)  # type: ignore[attr-defined]
        return self.own * self.inner.frequencies(geometry).attention_factor

    def reach(self, length: float, trained_length: int) -> float:
        return self.inner.reach(length, trained_length)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        spelled = self.inner.rope_parameters(geometry)
        if spelled["rope_type"] == "default" or not self.native:
            return spelled
        sharpening = self.sharpening(geometry)
        if "attention_factor" in spelled or spelled["rope_type"] == "yarn":
            spelled["attention_factor"] = self._both_laws() or 1.0
        if sharpening != 1 and self.inner.factor > 1:
            spelled["mscale_all_dim"] = (sharpening - 1) / (0.1 * math.log(self.inner.factor))
            if spelled["rope_type"] == "yarn" and not self._both_laws():
                # As DeepSeek's configs say it; all engines know this form.
                del spelled["attention_factor"]
                spelled["mscale"] = spelled["mscale_all_dim"]
        return spelled

    def options(self) -> dict[str, Any]:
        return self.inner.options()

    def _both_laws(self) -> float | None:
        """What cos and sin keep where the caller named both of YaRN's laws."""
        inner = self.inner
        if isinstance(inner, YaRN) and inner.mscale and inner.mscale_all_dim:
            return inner.cos_sin_factor()
        return None

    def __str__(self) -> str:
        return str(self.inner)
