"""ALiBi: biases that each layer is handed, with slopes that a patch scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from rope_patch.encodings.biases import device_slopes, linear_slopes, ntk_slopes
from rope_patch.encodings.sites.site import KeyMask, Site, Stretch
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.models import attention_implementation

# Fields of configs that say the length of pretraining; BLOOM's and Falcon's code reads none.
_LENGTH_FIELDS = ("max_seq_len", "seq_length", "max_position_embeddings")
_HALF = (torch.bfloat16, torch.float16)
_MASK = "attention_mask"


@dataclass(frozen=True, eq=False)
class SlopesSite(Site):
    """Layers that are handed a bias of one slope a head (BLOOM, MPT, Falcon).

    Attributes:
        argument: The bias's name among the layers' arguments.
        heads: Heads.
        head_dim: Width of a head.
        from_end: Whether the bias counts from the last key in float32 (MPT), not from the first.
    """

    argument: str
    heads: int
    head_dim: int
    from_end: bool

    kind: ClassVar[str] = "alibi"
    reads_slots: ClassVar[bool] = True
    methods: ClassVar[tuple[str, ...]] = ("linear", "ntk", "dynamic-linear", "dynamic-ntk")

    @property
    def options(self) -> tuple[str, ...]:
        """Return `exact`, except where the bias is exact already."""
        return () if self.from_end else ("exact",)

    def trained_length(self, config: Any) -> int | None:
        """Return what the config says, if anything."""
        lengths = (getattr(config, name, None) for name in _LENGTH_FIELDS)
        return next((n for n in lengths if isinstance(n, int)), None)

    def longest_text(self, config: Any) -> int | None:
        """Return MPT's length, to which its code builds the bias; None if there is no such end."""
        return getattr(config, "max_seq_len", None)

    def config_fields(self, config: Any, stretch: Stretch) -> dict[str, int]:
        """Return MPT's length, to which its code builds the bias."""
        if stretch.length is None or not isinstance(getattr(config, "max_seq_len", None), int):
            return {}
        return {"max_seq_len": stretch.length}

    def scales(
        self, stretch: Stretch, factor: float | torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """Return what multiplies each head's slope, `[heads]` float64.

        Args:
            stretch: The method.
            factor: Its factor, a number or a tensor of one, on the CPU or the device.
            device: Of the result.
        """
        slopes = device_slopes(self.heads, device)
        scaled = (linear_slopes if stretch.formula == "linear" else ntk_slopes)(slopes, factor)
        return scaled / slopes

    def describe(self, stretch: Stretch) -> str:
        """Return the slopes' range of scales."""
        if stretch.is_dynamic:
            return f"{self.name}: ALiBi's slopes of {self.heads} heads follow the text's length"
        scales = self.scales(stretch, stretch.factor, torch.device("cpu"))
        return (
            f"{self.name}: ALiBi's slopes of {self.heads} heads times {scales.max():.4g} "
            f"(steepest) to {scales.min():.4g} (flattest)"
        )

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Scale the bias before each layer: so it acts with and without masks and caches."""
        hook = SlopeHook(self, stretch)
        for layer in self.module.children():
            undo_log.hook(layer, before=hook)


class _Memo:
    """What a forward's layers share, by the bias that all of them are handed."""

    def __init__(self) -> None:
        self.entries: Any = WeakTensorKeyDictionary()  # an entry goes when its bias goes

    # Copies of a model begin with an empty one.
    def __deepcopy__(self, memo: Any) -> _Memo:
        return _Memo()

    def __reduce__(self) -> Any:
        return _Memo, ()


@dataclass(frozen=True)
class SlopeHook:
    """Pre-hook of layers that scales the bias they are handed, or builds it anew.

    A bias that counts from the first key has large numbers, of which half precision keeps 8 or 11
    bits, so that neighbours far into a text look equal. The exact form, -slope * (i - j), is small
    where it matters. It takes `[B * heads, Q, K]` numbers for a forward, as many as the scores of
    one layer.

    Attributes:
        site: The layers' site.
        stretch: How far they are extended.
    """

    site: SlopesSite
    stretch: Stretch
    _memo: _Memo = field(default_factory=_Memo)

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        bias: Any = kwargs.get(self.site.argument)
        if bias is None:
            return None
        if torch.compiler.is_compiling():  # Inductor shares equal subgraphs by itself
            return args, kwargs | self._changes(layer, bias, kwargs)
        changes = self._memo.entries.get(bias)
        if changes is None:
            changes = self._memo.entries[bias] = self._changes(layer, bias, kwargs)
        return args, kwargs | changes

    def _changes(
        self, layer: nn.Module, bias: torch.Tensor, kwargs: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the arguments that replace those of a layer, by name."""
        site, stretch = self.site, self.stretch
        mask: Any = kwargs.get(_MASK)
        key_mask = KeyMask.of(mask)
        changes: dict[str, torch.Tensor] = {}
        if site.from_end and key_mask is not None and key_mask.keys > bias.shape[-1]:
            bias = changes[site.argument] = _longer(bias, key_mask.keys)
        keys = bias.shape[-1]
        if stretch.is_dynamic and keys <= stretch.trained_length:
            return changes
        factor: float | torch.Tensor = stretch.factor
        is_longer = None  # up to the trained length, dynamic methods keep the model's own bits
        if stretch.is_dynamic:
            # A static cache has more keys than tokens; the mask knows what the last query sees.
            tokens = torch.tensor(keys) if key_mask is None else key_mask.tokens
            factor = stretch.factor_at(tokens)
            is_longer = factor > 1
        scales = site.scales(stretch, factor, bias.device).float()
        is_folded = key_mask is not None and key_mask.visible.shape[1] == site.heads > 1
        exact = bias.dtype in _HALF or is_folded if stretch.exact is None else stretch.exact
        if key_mask is None or not exact or site.from_end:
            changes[site.argument] = _scaled(bias, scales)
            if key_mask is not None and is_folded:
                changes[_MASK] = torch.where(key_mask.visible, _scaled(mask, scales), mask)
            return changes
        slopes = device_slopes(site.heads, bias.device).float() * scales
        if is_folded:
            changes = self._folded(layer, key_mask, slopes, kwargs)
        else:
            rows = len(bias) // site.heads
            built = key_mask.exact_bias(slopes, bias.dtype).expand(rows, -1, -1, -1)
            changes = {site.argument: built.flatten(0, 1)}
        if is_longer is not None:
            for name, value in changes.items():
                changes[name] = torch.where(is_longer, value, kwargs[name])
        return changes

    def _folded(
        self, layer: nn.Module, key_mask: KeyMask, slopes: torch.Tensor, kwargs: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the exact bias in the mask alone, as often as the attention adds it (Falcon)."""
        # Falcon divides it by sqrt(head_dim) and adds it to the mask; its eager attention adds its
        # argument once more.
        argument, mask, bias = self.site.argument, kwargs[_MASK], kwargs[self.site.argument]
        config = next(vars(part)["config"] for part in layer.modules() if "config" in vars(part))
        is_fused = attention_implementation(config) == "sdpa" and not kwargs.get(
            "output_attentions"
        )
        times = (1 if is_fused else 2) / math.sqrt(self.site.head_dim)
        built = key_mask.exact_bias(slopes * times, mask.dtype)
        return {
            _MASK: torch.where(key_mask.visible, built, mask),
            argument: torch.zeros_like(bias),
        }


def _scaled(bias: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return a bias of all heads, `[heads or B * heads, 1, K]` or `[B, heads, ...]`, scaled."""
    by_head = bias.view(-1, len(scales), *bias.shape[1:]) if bias.ndim == 3 else bias
    shape = (1, len(scales), *[1] * (by_head.ndim - 2))
    return (by_head * scales.view(shape).to(bias.dtype)).view(bias.shape)


def _longer(bias: torch.Tensor, keys: int) -> torch.Tensor:
    """Return a bias that ends at 0 for more keys, `[heads, 1, keys]` (MPT's form)."""
    slope = bias[..., -1:] - bias[..., -2:-1]
    return slope * torch.arange(1 - keys, 1, device=bias.device, dtype=bias.dtype)
