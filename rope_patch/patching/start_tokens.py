"""The first tokens of a sequence under the rotation from before (LongRoPE's start tokens).

What counts is the position that a token stands at, not its index: tokens behind padding, cached
ones, and every document of a packed row have first tokens of their own. Their keys never change
their rotation, so in a cache nothing is to be done about them but to leave them alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.patching.architecture.layout import is_mrope
from rope_patch.patching.architecture.probe import make_probe, set_frequencies
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_decoder
from rope_patch.patching.dynamic.sequence_lengths import mask_columns, require_document_positions
from rope_patch.patching.kernels.attention_forward import forward_attribute
from rope_patch.patching.method_wrappers import ContinuedScaling
from rope_patch.patching.mla_scale import SoftmaxScaled
from rope_patch.patching.replicas import forward_for_replica
from rope_patch.patching.undo_log import UndoLog


def start_frequencies(
    geometries: dict[str | None, Geometry], before: dict[str | None, Frequencies]
) -> dict[str | None, Frequencies]:
    """What the first tokens rotate by: the start of the extension, for each layer type it changes.

    Args:
        geometries: The layer types that change.
        before: What the unpatched model rotates by.
    """
    found = {}
    for kind in geometries.keys() & before.keys():
        start = Frequencies(geometries[kind].inv_freq(), geometries[kind].attention_factor)
        # The very bits of the unpatched model, where that is the start.
        found[kind] = before[kind] if start.close_to(before[kind]) else start
    return found


class StartTokenRotary:
    """A rotary module's forward, in which positions below `tokens` are rotated by other numbers.

    Those come from a second module of the same kind, so its layout of cos and sin, or complex
    numbers, is the architecture's own. It is not among the model's modules: casts do not reach it.
    """

    def __init__(
        self, own: Any, start: nn.Module, kinds: Iterable[str | None], tokens: int
    ) -> None:
        self.original_forward = own
        self.start_module = start
        self.layer_types = tuple(kinds)
        self.tokens = tokens

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        turned = self.original_forward(x, position_ids, *args, **kwargs)
        kind = args[0] if args else kwargs.get("layer_type")
        if kind not in self.layer_types and None not in self.layer_types:
            return turned
        if not torch.compiler.is_compiling():
            self._sync_device(x.device)
        kept = self.start_module(x, position_ids, *args, **kwargs)
        first = position_ids < self.tokens
        if isinstance(turned, torch.Tensor):
            return _select_by_position(first, kept, turned)
        return tuple(_select_by_position(first, k, t) for k, t in zip(kept, turned, strict=True))

    def for_replica(self, replica: Any) -> StartTokenRotary:
        """Return the forward for a replica of the module (`nn.DataParallel`), on its own device."""
        own = forward_for_replica(self.original_forward, replica)
        return StartTokenRotary(
            own, copy.deepcopy(self.start_module), self.layer_types, self.tokens
        )

    def retire(self) -> None:
        """Rotate all tokens alike from now on: the patch is undone, but a wrapper calls this."""
        self.tokens = 0

    def _sync_device(self, device: torch.device) -> None:
        """Brings the second module to where the model is; some forwards do not do it themselves."""
        if next(self.start_module.buffers()).device != device:
            self.start_module.to(device)


def _select_by_position(
    first: torch.Tensor, kept: torch.Tensor, turned: torch.Tensor
) -> torch.Tensor:
    first = first.to(turned.device).reshape(*first.shape, *[1] * (turned.ndim - first.ndim))
    return torch.where(first, kept, turned)


def install_start_tokens(
    model: nn.Module,
    rotary: RotaryModule,
    geometries: dict[str | None, Geometry],
    before: dict[str | None, Frequencies],
    config: Any,
    tokens: int,
    undo_log: UndoLog,
) -> None:
    """Has the first tokens rotate as before the extension.

    Args:
        model: The model.
        rotary: One of its rotary modules.
        geometries: The layer types that change.
        before: What the unpatched module rotates by.
        config: The text config of the unpatched model.
        tokens: How many positions.
        undo_log: Where the changes are recorded.
    """
    kept = start_frequencies(geometries, before)
    if not kept:
        return
    slot = forward_attribute(rotary.module)
    own = getattr(rotary.module, slot)
    undo_log.set(rotary.module, slot, _make_forward(rotary, own, before, kept, config, tokens))
    decoder = find_decoder(model, rotary)
    undo_log.hook(decoder, before=PaddingAwarePositions(decoder))


def _make_forward(
    rotary: RotaryModule,
    own: Any,
    before: dict[str | None, Frequencies],
    kept: dict[str | None, Frequencies],
    config: Any,
    tokens: int,
) -> StartTokenRotary:
    start = make_probe(rotary, config)
    set_frequencies(RotaryModule(start, rotary.prefixes), before, kept, UndoLog())
    return StartTokenRotary(own, start, kept, tokens)


class PaddingAwarePositions:
    """Ahead of a decoder's forward: counts positions from each row's first token.

    A mask tells where that is. Without start tokens only distances matter, and models that are
    given no positions count padding, too.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._names = list(inspect.signature(type(decoder).forward).parameters)[1:]

    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if given.get("position_ids") is not None:
            return None
        require_document_positions(given)
        mask = given.get("attention_mask")
        if not isinstance(mask, torch.Tensor):
            return None
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None or mask.ndim != 2 or mask.shape[1] < tokens.shape[1]:
            return None
        steps = tokens.shape[1]
        cache = given.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        past = cache.get_seq_length() if cache is not None else 0
        counted = mask.long().cumsum(1) - 1
        # A mask of the new tokens alone says nothing of those before them.
        counted = counted + past if mask.shape[1] == steps else mask_columns(counted, past, steps)
        positions = counted.clamp(min=0).to(tokens.device)
        at = self._names.index("position_ids")
        if len(args) > at:
            return (*args[:at], positions, *args[at + 1 :]), kwargs
        return args, {**kwargs, "position_ids": positions}


@contextmanager
def preserve_start_keys(
    layers: list[torch.Tensor], at: torch.Tensor, tokens: int
) -> Iterator[None]:
    """Around a change of cached keys: those of the first tokens are the same bits afterwards.

    Args:
        layers: Keys that are changed in place, `[B, K, S, D]`.
        at: Where they were rotated at, `[B, S]`.
        tokens: How many positions are to stay.
    """
    if not tokens:
        yield
        return
    rows, slots = (at < tokens).nonzero(as_tuple=True)
    rows, slots = rows.to(layers[0].device), slots.to(layers[0].device)
    saved = [keys[rows, :, slots] for keys in layers]  # `[N, K, D]`, copies
    yield
    for keys, kept in zip(layers, saved, strict=True):
        keys[rows, :, slots] = kept


def require_start_tokens_supported(
    model: nn.Module,
    method: Method,
    length: int | None,
    geometries: dict[str | None, Geometry],
    rotaries: list[tuple[RotaryModule, dict[str | None, Frequencies]]],
    config: Any,
) -> None:
    """Refuses start tokens where they would do nothing, or cannot be had.

    Args:
        model: The model.
        method: What it is to be patched with.
        length: The target length in tokens, if there is one.
        geometries: The layer types that change.
        rotaries: The rotary modules, each with what it rotates by when unpatched.
        config: The text config of the unpatched model.

    Raises:
        ValueError: Says why.
    """
    tokens = method.start_token_count
    if not tokens:
        return
    trained = next(iter(geometries.values())).trained_length
    largest = min(trained, (length or trained + 1) - 1)
    if tokens > largest:
        raise ValueError(
            f"start_tokens must be at most {largest:,}, within the trained length ({trained:,} "
            f"tokens) and below the target, got {tokens:,}: they keep the unextended rotation, "
            "which is trained no further"
        )
    inner = method
    if isinstance(inner, SoftmaxScaled):
        sharpening = inner.softmax_mscale(next(iter(geometries.values())))
        if abs(sharpening - inner.own_mscale) > 1e-6:
            raise ValueError(
                "start_tokens keep their attention as it was, but this architecture has the "
                f"attention factor ({sharpening:.6g}) in its softmax scale, which knows no tokens: "
                "pass attention_factor=1, or leave start_tokens out"
            )
        inner = inner.inner
    if isinstance(inner, ContinuedScaling) and inner.short_frequencies:
        raise ValueError(
            "start_tokens keep the rotation from before, but the config's own longrope has two of "
            "them, for short and for long sequences: leave start_tokens out, or pass "
            'start="unscaled"'
        )
    for rotary, before in rotaries:
        kept = start_frequencies(geometries, before)
        if not kept:
            continue
        name = type(rotary.module).__name__
        if is_mrope(rotary.module, config):
            raise ValueError(
                f"{type(config).__name__} gives a token several positions (M-RoPE), so {name} "
                "knows no first tokens: leave start_tokens out"
            )
        find_decoder(model, rotary)
        if not _probe_start_tokens(rotary, before, kept, config, tokens):
            raise ValueError(
                f"{name} does not hand out one rotation for each position in the way that others "
                "do, so the first cannot be kept apart: leave start_tokens out"
            )


def _probe_start_tokens(
    rotary: RotaryModule,
    before: dict[str | None, Frequencies],
    kept: dict[str | None, Frequencies],
    config: Any,
    tokens: int,
) -> bool:
    """Tries it on a module of the same kind, token by token beside all at once."""
    changed = make_probe(rotary, config)
    halved = {k: Frequencies(f.inv_freq / 2, 2 * f.attention_factor) for k, f in kept.items()}
    set_frequencies(RotaryModule(changed, rotary.prefixes), before, halved, UndoLog())
    plain = make_probe(rotary, config)
    set_frequencies(RotaryModule(plain, rotary.prefixes), before, kept, UndoLog())
    ours = _make_forward(rotary, changed.forward, before, kept, config, tokens)
    with torch.device("cpu"):
        x = torch.zeros(2, 3, 4)
        positions = torch.tensor([[tokens + 5, tokens - 1, tokens], [tokens, 2 * tokens, 0]])
    for kind in kept:
        kinds = () if kind is None else (kind,)
        try:
            got, low, high = (_as_tuple(f(x, positions, *kinds)) for f in (ours, plain, changed))
            for row, column in positions.new_ones(2, 3).nonzero().tolist():
                expected = low if positions[row, column] < tokens else high
                for a, b in zip(got, expected, strict=True):
                    if not torch.equal(a[row, column], b[row, column]):
                        return False
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return False
    return True


def _as_tuple(handed: Any) -> tuple[torch.Tensor, ...]:
    return handed if isinstance(handed, tuple) else (handed,)
