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
from rope_patch.patching.architecture.layout import several_positions
from rope_patch.patching.architecture.probe import fresh, set_frequencies
from rope_patch.patching.architecture.rotary_modules import Rotary, find_decoder
from rope_patch.patching.dynamic.sequence_lengths import columns, require_documents
from rope_patch.patching.kernels.attention_forward import forward_slot
from rope_patch.patching.method_wrappers import Continued
from rope_patch.patching.mla_scale import InSoftmax
from rope_patch.patching.replicas import for_replica
from rope_patch.patching.undo_log import Swaps


def kept_frequencies(
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


class KeptStart:
    """A rotary module's forward, in which positions below `tokens` are rotated by other numbers.

    Those come from a second module of the same kind, so its layout of cos and sin, or complex
    numbers, is the architecture's own. It is not among the model's modules: casts do not reach it.
    """

    def __init__(
        self, own: Any, start: nn.Module, kinds: Iterable[str | None], tokens: int
    ) -> None:
        self.own = own
        self.start = start
        self.kinds = tuple(kinds)
        self.tokens = tokens

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        turned = self.own(x, position_ids, *args, **kwargs)
        kind = args[0] if args else kwargs.get("layer_type")
        if kind not in self.kinds and None not in self.kinds:
            return turned
        if not torch.compiler.is_compiling():
            self._follow(x.device)
        kept = self.start(x, position_ids, *args, **kwargs)
        first = position_ids < self.tokens
        if isinstance(turned, torch.Tensor):
            return _chosen(first, kept, turned)
        return tuple(_chosen(first, k, t) for k, t in zip(kept, turned, strict=True))

    def for_replica(self, replica: Any) -> KeptStart:
        """Return the forward for a replica of the module (`nn.DataParallel`), on its own device."""
        own = for_replica(self.own, replica)
        return KeptStart(own, copy.deepcopy(self.start), self.kinds, self.tokens)

    def retire(self) -> None:
        """Rotate all tokens alike from now on: the patch is undone, but a wrapper calls this."""
        self.tokens = 0

    def _follow(self, device: torch.device) -> None:
        """Brings the second module to where the model is; some forwards do not do it themselves."""
        if next(self.start.buffers()).device != device:
            self.start.to(device)


def _chosen(first: torch.Tensor, kept: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    first = first.to(turned.device).reshape(*first.shape, *[1] * (turned.ndim - first.ndim))
    return torch.where(first, kept, turned)


def keep_start(
    model: nn.Module,
    rotary: Rotary,
    geometries: dict[str | None, Geometry],
    before: dict[str | None, Frequencies],
    config: Any,
    tokens: int,
    swaps: Swaps,
) -> None:
    """Has the first tokens rotate as before the extension.

    Args:
        model: The model.
        rotary: One of its rotary modules.
        geometries: The layer types that change.
        before: What the unpatched module rotates by.
        config: The text config of the unpatched model.
        tokens: How many positions.
        swaps: Where the changes are recorded.
    """
    kept = kept_frequencies(geometries, before)
    if not kept:
        return
    slot = forward_slot(rotary.module)
    own = getattr(rotary.module, slot)
    swaps.set(rotary.module, slot, _wrapped(rotary, own, before, kept, config, tokens))
    decoder = find_decoder(model, rotary)
    swaps.hook(decoder, before=Counted(decoder))


def _wrapped(
    rotary: Rotary,
    own: Any,
    before: dict[str | None, Frequencies],
    kept: dict[str | None, Frequencies],
    config: Any,
    tokens: int,
) -> KeptStart:
    start = fresh(rotary, config)
    set_frequencies(Rotary(start, rotary.prefixes), before, kept, Swaps())
    return KeptStart(own, start, kept, tokens)


class Counted:
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
        require_documents(given)
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
        counted = counted + past if mask.shape[1] == steps else columns(counted, past, steps)
        positions = counted.clamp(min=0).to(tokens.device)
        at = self._names.index("position_ids")
        if len(args) > at:
            return (*args[:at], positions, *args[at + 1 :]), kwargs
        return args, {**kwargs, "position_ids": positions}


@contextmanager
def left_alone(layers: list[torch.Tensor], at: torch.Tensor, tokens: int) -> Iterator[None]:
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


def require_keepable(
    model: nn.Module,
    method: Method,
    length: int | None,
    geometries: dict[str | None, Geometry],
    rotaries: list[tuple[Rotary, dict[str | None, Frequencies]]],
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
    tokens = method.kept_tokens
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
    if isinstance(inner, InSoftmax):
        sharpening = inner.sharpening(next(iter(geometries.values())))
        if abs(sharpening - inner.own) > 1e-6:
            raise ValueError(
                "start_tokens keep their attention as it was, but this architecture has the "
                f"attention factor ({sharpening:.6g}) in its softmax scale, which knows no tokens: "
                "pass attention_factor=1, or leave start_tokens out"
            )
        inner = inner.inner
    if isinstance(inner, Continued) and inner.short:
        raise ValueError(
            "start_tokens keep the rotation from before, but the config's own longrope has two of "
            "them, for short and for long sequences: leave start_tokens out, or pass "
            'start="unscaled"'
        )
    for rotary, before in rotaries:
        kept = kept_frequencies(geometries, before)
        if not kept:
            continue
        name = type(rotary.module).__name__
        if several_positions(rotary.module, config):
            raise ValueError(
                f"{type(config).__name__} gives a token several positions (M-RoPE), so {name} "
                "knows no first tokens: leave start_tokens out"
            )
        find_decoder(model, rotary)
        if not _keeps(rotary, before, kept, config, tokens):
            raise ValueError(
                f"{name} does not hand out one rotation for each position in the way that others "
                "do, so the first cannot be kept apart: leave start_tokens out"
            )


def _keeps(
    rotary: Rotary,
    before: dict[str | None, Frequencies],
    kept: dict[str | None, Frequencies],
    config: Any,
    tokens: int,
) -> bool:
    """Tries it on a module of the same kind, token by token beside all at once."""
    changed = fresh(rotary, config)
    halved = {k: Frequencies(f.inv_freq / 2, 2 * f.attention_factor) for k, f in kept.items()}
    set_frequencies(Rotary(changed, rotary.prefixes), before, halved, Swaps())
    plain = fresh(rotary, config)
    set_frequencies(Rotary(plain, rotary.prefixes), before, kept, Swaps())
    ours = _wrapped(rotary, changed.forward, before, kept, config, tokens)
    with torch.device("cpu"):
        x = torch.zeros(2, 3, 4)
        positions = torch.tensor([[tokens + 5, tokens - 1, tokens], [tokens, 2 * tokens, 0]])
    for kind in kept:
        kinds = () if kind is None else (kind,)
        try:
            got, low, high = (_parts(f(x, positions, *kinds)) for f in (ours, plain, changed))
            for row, column in positions.new_ones(2, 3).nonzero().tolist():
                expected = low if positions[row, column] < tokens else high
                for a, b in zip(got, expected, strict=True):
                    if not torch.equal(a[row, column], b[row, column]):
                        return False
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return False
    return True


def _parts(handed: Any) -> tuple[torch.Tensor, ...]:
    return handed if isinstance(handed, tuple) else (handed,)
