"""ALiBi: biases that each layer is handed, with slopes that a patch scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.encodings.alibi import alibi_slopes, linear_slopes, ntk_slopes
from rope_patch.patching.encodings.site import Site, Stretch
from rope_patch.patching.undo_log import UndoLog

# Fields of configs that say the length of pretraining; BLOOM's and Falcon's code reads none.
_LENGTH_FIELDS = ("max_seq_len", "seq_length", "max_position_embeddings")


@dataclass(frozen=True, eq=False)
class SlopesSite(Site):
    """Layers that are handed a bias of one slope a head (BLOOM, MPT, Falcon).

    Attributes:
        argument: The bias's name among the layers' arguments.
        heads: Heads.
    """

    argument: str
    heads: int

    kind: ClassVar[str] = "alibi"
    methods: ClassVar[tuple[str, ...]] = ("linear", "ntk", "dynamic-linear", "dynamic-ntk")

    def trained_length(self, config: Any) -> int | None:
        """Return what the config says, if anything."""
        lengths = (getattr(config, name, None) for name in _LENGTH_FIELDS)
        return next((n for n in lengths if isinstance(n, int)), None)

    def changes(self, stretch: Stretch) -> bool:
        """Return whether any slope becomes another."""
        return stretch.is_dynamic or stretch.factor > 1

    def config_fields(self, config: Any, stretch: Stretch) -> dict[str, int]:
        """Return MPT's length, to which its code builds the bias."""
        if stretch.length is None or not isinstance(getattr(config, "max_seq_len", None), int):
            return {}
        return {"max_seq_len": stretch.length}

    def scales(self, stretch: Stretch, factor: float) -> torch.Tensor:
        """Return what multiplies each head's slope, `[heads]` float64."""
        slopes = alibi_slopes(self.heads)
        scaled = (linear_slopes if stretch.formula == "linear" else ntk_slopes)(slopes, factor)
        return scaled / slopes

    def describe(self, stretch: Stretch) -> str:
        """Return the slopes' range of scales."""
        if stretch.is_dynamic:
            return f"{self.name}: ALiBi's slopes of {self.heads} heads follow the text's length"
        scales = self.scales(stretch, stretch.factor)
        return (
            f"{self.name}: ALiBi's slopes of {self.heads} heads times {scales.max():.4g} "
            f"(steepest) to {scales.min():.4g} (flattest)"
        )

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Scale the bias before each layer: so it acts with and without masks and caches."""
        for layer in self.module.children():
            undo_log.hook(layer, before=SlopeHook(self, stretch))


@dataclass(frozen=True, eq=False)
class SlopeHook:
    """Pre-hook of a layer that scales the bias it is handed.

    Attributes:
        site: The layers' site.
        stretch: How far they are extended.
    """

    site: SlopesSite
    stretch: Stretch

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        bias: Any = kwargs.get(self.site.argument)
        mask: Any = kwargs.get("attention_mask")
        if bias is None:
            return None
        keys = bias.shape[-1]
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[-1] > keys:
            keys = mask.shape[-1]
            bias = _longer(bias, keys)
        factor = self.stretch.factor_at(keys)
        if factor == 1:
            return args, {**kwargs, self.site.argument: bias}
        scales = self.site.scales(self.stretch, factor).to(bias.device)
        changed = {**kwargs, self.site.argument: _scaled(bias, scales)}
        if _has_bias(mask, len(scales)):  # Falcon's mask holds the bias, too
            lowest = torch.finfo(mask.dtype).min
            changed["attention_mask"] = torch.where(mask > lowest, _scaled(mask, scales), mask)
        return args, changed


def _scaled(bias: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return a bias of all heads, `[heads or B * heads, 1, K]` or `[B, heads, ...]`, scaled."""
    by_head = bias.view(-1, len(scales), *bias.shape[1:]) if bias.ndim == 3 else bias
    shape = (1, len(scales), *[1] * (by_head.ndim - 2))
    return (by_head * scales.view(shape).to(bias.dtype)).view(bias.shape)


def _longer(bias: torch.Tensor, keys: int) -> torch.Tensor:
    """Return a bias that ends at 0 for more keys, `[heads, 1, keys]` (MPT's form)."""
    slope = bias[..., -1:] - bias[..., -2:-1]
    return slope * torch.arange(1 - keys, 1, device=bias.device, dtype=bias.dtype)


def _has_bias(mask: Any, heads: int) -> bool:
    return (
        isinstance(mask, torch.Tensor)
        and mask.ndim == 4
        and mask.shape[1] == heads > 1
        and mask.is_floating_point()
    )
