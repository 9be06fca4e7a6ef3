"""Encodings that add a number to each attention logit: ALiBi, T5, KERPLE, FIRE and Sandwich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.encodings.biases import (
    alibi_bias,
    alibi_slopes,
    device_slopes,
    fire_progress,
    kerple_log,
    kerple_power,
    sandwich,
    t5_bucket,
)
from rope_patch.encodings.replacement.encoding import (
    BiasEncoding,
    DecoderShape,
    Span,
    register_encoding,
    require_count,
    require_positive,
)
from rope_patch.encodings.sites.buckets import BucketsSite
from rope_patch.encodings.sites.site import Site, Stretch
from rope_patch.encodings.sites.slopes import SlopesSite
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused

_LEAST = 0.01  # lower bound of KERPLE's parameters
_KERPLE = ("log", "power")


@register_encoding("alibi")
class AlibiBias(BiasEncoding):
    """A penalty that grows evenly with distance, by another slope in each head (2108.12409).

    Attributes:
        extension: The site and how far it is extended, or None.
    """

    extension: tuple[SlopesSite, Stretch] | None = None

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.head_dim = shape.width // shape.heads

    def forward(self, span: Span) -> torch.Tensor:
        device = span.queries.device
        slopes = device_slopes(self.heads, device)
        if self.extension is not None:
            site, stretch = self.extension
            is_dynamic = stretch.is_dynamic
            factor = stretch.factor_at(span.tokens) if is_dynamic else stretch.factor
            slopes = slopes * site.scales(stretch, factor, device)
        return alibi_bias(slopes.float(), span.distances.float())[None]

    def sites(self, name: str) -> Sequence[Site]:
        return [ComputedSlopesSite(name, self, "", self.heads, self.head_dim, from_end=True)]

    def describe(self) -> str:
        slopes = alibi_slopes(self.heads)
        return (
            f"logits lose {slopes.max():.4g} (steepest of {self.heads} heads) to "
            f"{slopes.min():.4g} a token of distance"
        )


@dataclass(frozen=True, eq=False)
class ComputedSlopesSite(SlopesSite):
    """Slopes of an encoding that computes its own bias."""

    def config_fields(self, config: Any, stretch: Stretch) -> dict[str, int]:
        """Return nothing: the bias has no length."""
        return {}

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Have the encoding scale its slopes."""
        undo_log.set(self.module, "extension", (self, stretch))


@register_encoding("t5")
class T5Bias(BiasEncoding):
    """A trained bias for each bucket of distances (arXiv:1910.10683), shared by all layers.

    Attributes:
        relative_attention_bias: The biases, a row a bucket and a column a head.
        relative_attention_num_buckets: Rows, as T5's attention names them.
        relative_attention_max_distance: Where the last bucket begins, at the latest.
    """

    is_decoder = True  # what T5's attention tells BucketsSite

    def __init__(self, shape: DecoderShape, *, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        require_count("buckets", buckets, least=4)
        require_count("max_distance", max_distance, least=buckets // 2 + 1)
        self.length = shape.length
        self.relative_attention_num_buckets = buckets
        self.relative_attention_max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(buckets, shape.heads)
        nn.init.normal_(self.relative_attention_bias.weight, std=shape.spread)

    def forward(self, span: Span) -> torch.Tensor:
        bucket = self._relative_position_bucket(
            -span.distances,
            bidirectional=False,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
            tokens=span.tokens,
        )
        table = self.relative_attention_bias.weight
        wide = torch.promote_types(table.dtype, torch.float32)
        return nn.functional.embedding(bucket, table.to(wide)).permute(2, 0, 1)[None]

    def _relative_position_bucket(
        self,
        relative: torch.Tensor,
        bidirectional: bool,
        num_buckets: int,
        max_distance: int,
        tokens: torch.Tensor | None = None,  # unused here; the patch's replacement takes it
    ) -> torch.Tensor:
        return t5_bucket(
            relative, bidirectional=bidirectional, buckets=num_buckets, max_distance=max_distance
        )

    def sites(self, name: str) -> Sequence[Site]:
        return [OwnBucketsSite(name, self)]

    def describe(self) -> str:
        return (
            f"logits get a trained bias for each of {self.relative_attention_num_buckets} buckets "
            f"of distances, the last from {self.relative_attention_max_distance} tokens on at the "
            "latest"
        )


@dataclass(frozen=True, eq=False)
class OwnBucketsSite(BucketsSite):
    """Buckets of an encoding that `rope_patch.encode` gave a model."""

    @property
    def is_given_mask(self) -> bool:
        """Return False: the encoding says how many tokens there are."""
        return False

    def trained_length(self, config: Any) -> int | None:
        """Return the longest text that the config stated when the model was encoded."""
        owner: Any = self.module
        return owner.length


@register_encoding("kerple")
class KerpleBias(BiasEncoding):
    """A penalty by the logarithm or a power of distance, trained for each head (2205.09921).

    Attributes:
        kind: "log" for -p ln(1 + a r), "power" for -p r ** a.
        weight: p of each head.
        rate: a of each head.
    """

    def __init__(self, shape: DecoderShape, *, kind: str = "log") -> None:
        super().__init__()
        if kind not in _KERPLE:
            raise Refused(f"kind must be one of {', '.join(_KERPLE)}, got {kind!r}")
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(shape.heads) * 2)
        self.rate = nn.Parameter(torch.rand(shape.heads))

    def forward(self, span: Span) -> torch.Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight, rate = (
            each.to(wide)[:, None, None].clamp(min=_LEAST) for each in (self.weight, self.rate)
        )
        if self.kind == "log":
            return kerple_log(span.distances, weight, rate)[None]
        # At 0 a power has no finite slope, and all its values are 0.
        distances = span.distances
        bias = kerple_power(distances.clamp(min=1), weight, rate.clamp(max=2))
        return (bias * (distances > 0))[None]

    def describe(self) -> str:
        formula = "p ln(1 + a r)" if self.kind == "log" else "p r ** a"
        return f"logits lose {formula} at distance r, with p and a trained for each head"


@register_encoding("sandwich")
class SandwichBias(BiasEncoding):
    """The dot product of two sinusoidal encodings, scaled for each head (arXiv:2212.10356).

    Attributes:
        width: Components of the sinusoidal encodings.
    """

    def __init__(self, shape: DecoderShape, *, width: int = 128) -> None:
        super().__init__()
        require_count("width", width, least=2)
        self.heads, self.width = shape.heads, width

    def forward(self, span: Span) -> torch.Tensor:
        # No distance is longer than the keys, whose number is known without the device.
        reach = torch.arange(len(span.keys), device=span.keys.device)
        return sandwich(reach, self.heads, self.width).float()[:, span.distances][None]

    def describe(self) -> str:
        return f"logits get the dot product of two sinusoidal encodings of width {self.width}"


@register_encoding("fire")
class FireBias(BiasEncoding):
    """A small network's value at a distance as a share of the query's position (2310.04418).

    One network serves all layers, which the paper calls FIRE-S.

    Attributes:
        inner: The network's first layer, from the share; a ReLU follows.
        outer: Its second layer, to a bias for each head.
        rate: c in ln(c r + 1).
        threshold: Positions below it count as it; trained as a multiple of the option.
    """

    def __init__(
        self, shape: DecoderShape, *, hidden: int = 32, rate: float = 0.1, threshold: float = 512.0
    ) -> None:
        super().__init__()
        require_count("hidden", hidden)
        require_positive("rate", rate)
        require_positive("threshold", threshold)
        self.initial_threshold = float(threshold)
        self.inner = nn.Linear(1, hidden)
        self.outer = nn.Linear(hidden, shape.heads)
        self.rate = nn.Parameter(torch.tensor(float(rate)))
        self.multiplier = nn.Parameter(torch.tensor(1.0))

    def forward(self, span: Span) -> torch.Tensor:
        wide = torch.promote_types(self.rate.dtype, torch.float32)
        if span.positions is None:  # slots are no positions where rows are padded
            raise Refused(
                "an attention was given no position_ids, which the encoding 'fire' divides "
                "distances by: expected a decoder whose layers are given them, as Llama's are"
            )
        queries = span.positions[:, :, None]
        progress = fire_progress(
            queries,
            queries - span.distances,
            self.rate.to(wide).abs(),
            (self.multiplier.to(wide) * self.initial_threshold).abs(),
        )
        hidden = _linear(progress[..., None], self.inner).relu()
        bias = _linear(hidden, self.outer)
        return bias.permute(0, 3, 1, 2)

    def describe(self) -> str:
        return "logits get a trained function of the distance as a share of the query's position"


def _linear(numbers: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """Return a layer's output in the dtype of its input, which is wider than weights may be."""
    return nn.functional.linear(numbers, layer.weight.to(numbers), layer.bias.to(numbers))
