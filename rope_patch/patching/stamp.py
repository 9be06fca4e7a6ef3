"""Mark caches with the rotation of their keys, and refuse caches of another rotation.

A static method never changes a cached key, so the same rotation must have filled the cache. The
mark is a digest of the rotation: an undone and repeated patch, copies of a model and other models
of the same rotation accept each other's caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.ops.modes import is_exporting
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.dynamic.frequency_table import UNCAPTURED
from rope_patch.patching.plan import PatchPlan
from rope_patch.patching.start_tokens import start_frequencies
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import (
    cache_in_output,
    known_length,
    self_attention_part,
)
from rope_patch.transformers_api.forwards import (
    CACHE,
    EMBEDDINGS,
    TOKENS,
    ForwardCall,
    missing_parameters,
    takes_cache,
    unknown_forward,
)
from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import Refused


class StampHooks:
    """Hooks around a decoder's forward that mark and check its caches.

    Attributes:
        rotation: The digest of the decoder's rotation; see `rotation_digest`.
    """

    def __init__(self, rotation: str) -> None:
        self.rotation = rotation

    def check_cache(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Mark the cache of a forward call, or refuse it (pre-hook of the decoder).

        Raises:
            ValueError: The cache holds keys of another rotation. The cache stays unchanged.
        """
        cache = ForwardCall(decoder, args, kwargs).cache
        if cache is None:
            return None
        mark = getattr(cache, "rotation", None)
        if mark == self.rotation:
            _require_unchanged(cache)
            return None
        if is_exporting():
            return None  # an exported program is traced with an empty cache and serves all
        changed = None
        if hasattr(cache, "get_seq_length"):
            length = cache.get_seq_length()
            if torch.compiler.is_compiling() and isinstance(length, torch.Tensor):
                # A graph cannot read the length: an op reads it when the graph runs.
                changed = _add_to_tokens(torch.ops.rope_patch.require_empty(length), args, kwargs)
            elif int(length) > 0:
                raise Refused(cache_refusal(int(length), marked=mark is not None))
        elif mark is not None:  # the length of a paged cache is unknown
            raise Refused(cache_refusal(None, marked=True))
        cache.rotation = self.rotation
        return changed

    def mark_cache(
        self, decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        """Mark a cache that the decoder made, and note its length (hook of the decoder)."""
        cache = ForwardCall(decoder, args, kwargs).cache
        if cache is None:
            cache = cache_in_output(output)
            if cache is None:
                return
            cache.rotation = self.rotation
        _note_length(cache)


class StampedPrompt:
    """PEFT's `get_prompt`, whose cache holds trained keys and is valid for any rotation."""

    def __init__(self, original_method: Any, rotation: str) -> None:
        self.original_method = original_method
        self.rotation = rotation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prompt = self.original_method(*args, **kwargs)
        if hasattr(prompt, "get_seq_length"):  # else embeddings, as for prompt tuning
            stamp_cache(prompt, self.rotation)
        return prompt


def install_cache_stamps(
    model: nn.Module, rotaries: list[RotaryModule], rotation: str, undo_log: UndoLog
) -> None:
    """Have a model's decoders mark and check their caches.

    Args:
        model: The model.
        rotaries: Its rotary modules.
        rotation: The digest of their rotation.
        undo_log: Log of the changes.
    """
    for decoder in innermost_decoders(model, rotaries):
        hooks = StampHooks(rotation)
        undo_log.hook(decoder, before=hooks.check_cache, after=hooks.mark_cache)
    for module in model.modules():
        if hasattr(type(module), "get_prompt") and hasattr(module, "prompt_encoder"):
            undo_log.set(module, "get_prompt", StampedPrompt(module.get_prompt, rotation))


def stamp_cache(cache: Any, rotation: str) -> None:
    """Mark a cache with the rotation of its keys.

    Raises:
        TypeError: Not a cache.
    """
    if not hasattr(cache, "get_seq_length"):
        raise TypeError(f"expected a transformers cache, got {type(cache).__name__}")
    cache = self_attention_part(cache)
    cache.rotation = rotation
    _note_length(cache)


def _note_length(cache: Any) -> None:
    """Note how many tokens a marked cache holds, unless that needs a read from a device."""
    cache.rotated_tokens = None if torch.compiler.is_compiling() else known_length(cache)


def _require_unchanged(cache: Any) -> None:
    """Raise if a marked cache holds tokens that came while the patch was not in effect."""
    if torch.compiler.is_compiling() or (rotated := getattr(cache, "rotated_tokens", None)) is None:
        return
    length = known_length(cache)
    if length is not None and length > rotated:
        raise Refused(
            f"the cache holds {length} tokens, of which this rotation rotated {rotated}: the rest "
            "came from the unpatched model, which cannot refuse. Expected a cache that was filled "
            "under this rotation alone: read the text again into a new cache"
        )


def require_static(method: object, length_hooks: list[Any]) -> None:
    """Raise if frequencies follow the sequence, so that only the model can record a rotation.

    Raises:
        ValueError: They do. The message says what to do instead.
    """
    if length_hooks:
        raise Refused(
            f"{method} follows the length, and accepts no cache without the record that the model "
            "keeps in it: expected a method whose frequencies stay, such as yarn; copy caches of "
            "other methods with copy.deepcopy, which keeps the record"
        )


def rotation_digest(plan: PatchPlan, after: dict[str | None, Frequencies]) -> str:
    """Return a digest that two patches share if and only if they rotate alike.

    Args:
        plan: The patch.
        after: New frequencies of the layer types that change.
    """
    sets, start = set(), set()
    for traits in plan.rotaries:
        before = traits.frequencies
        sets |= {(str(layer_type), (before | after)[layer_type].key) for layer_type in before}
        if plan.method.start_token_count:
            start_tokens = start_frequencies(plan.geometries, before)
            start |= {
                (str(layer_type), frequencies.key)
                for layer_type, frequencies in start_tokens.items()
            }
    parts = (
        sorted(sets),
        plan.method.start_token_count,
        sorted(start),
        f"{plan.softmax_mscale:.6g}",
    )
    return digest(repr(parts), 32)


def cache_refusal(length: int | None, *, marked: bool) -> str:
    """Return the message that refuses a cache and says what to do.

    Args:
        length: Tokens in the cache, where known.
        marked: Whether another patch has marked the cache.
    """
    tokens = "keys" if length is None else f"{length} tokens"
    why = (
        "another patch rotated their keys"
        if marked
        else "nothing says that this patch rotated their keys: the cache was filled before the "
        "model was patched, or rebuilt from tensors, or is the prefix of a PEFT model that was put "
        "around the patched one (patch the PEFT model instead)"
    )
    return (
        f"the cache holds {tokens}, and {why}. Expected an empty cache, or one that was filled "
        "under the same rotation: read the text again into a new cache. If this very rotation did "
        "fill it, say so with `rope_patch.current(model).accept_cache(cache)`"
    )


@torch.library.custom_op("rope_patch::require_empty", mutates_args=(), **UNCAPTURED)
def require_empty(length: torch.Tensor) -> torch.Tensor:
    """Return 0 for an empty cache, and raise for others, when a compiled graph runs.

    Args:
        length: Tokens in the cache, one number.
    """
    if int(length) > 0:
        raise Refused(cache_refusal(int(length), marked=False))
    return torch.zeros_like(length)


@require_empty.register_fake
def _(length):
    return torch.zeros_like(length)


def _add_to_tokens(
    zero: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add 0 to the tokens, so that no compiler drops the op that returned it."""
    for name in (TOKENS, EMBEDDINGS):
        if (tokens := kwargs.get(name)) is not None:
            return args, {**kwargs, name: tokens + zero.to(tokens.device)}
    return (args[0] + zero.to(args[0].device), *args[1:]), kwargs


def innermost_decoders(model: nn.Module, rotaries: list[RotaryModule]) -> list[nn.Module]:
    """Return the innermost modules around the rotary modules that are given tokens and a cache.

    Encoders, which have no cache, are left out.

    Raises:
        ValueError: Parts of the model have a cache, but it reaches them in a way that is not known.
    """
    inner: dict[int, nn.Module] = {}
    for rotary in rotaries:
        around = [
            module
            for module in model.modules()
            if not missing_parameters(module, (TOKENS, CACHE))
            and any(part is rotary.module for part in module.modules())
        ]
        if not around and takes_cache(model):
            raise unknown_forward(
                model, "a cache of another rotation could not be refused there", (TOKENS, CACHE)
            )
        inner |= {id(module): module for module in around[-1:]}
    # An encoder's rotary module is only within the module around both encoder and decoder.
    return [
        module
        for module in inner.values()
        if not any(id(part) in inner for part in module.modules() if part is not module)
    ]
