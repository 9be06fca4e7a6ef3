"""Start tokens (LongRoPE): the first positions of a sequence keep the base rotation.

A start token is a token at a low position, not at a low index: padded rows, cached tokens and every
document of a packed row have start tokens of their own. Their keys never change their
rotation, so re-rotation leaves them as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.patching.architecture.mla_scale import SoftmaxScaled
from rope_patch.patching.architecture.rotary_traits import RotaryTraits, as_tuple
from rope_patch.patching.kernels.attention_forward import forward_attribute
from rope_patch.patching.method_wrappers import ContinuedScaling
from rope_patch.patching.torch_state import forward_for_replica
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused


def start_frequencies(
    geometries: dict[str | None, Geometry], before: dict[str | None, Frequencies]
) -> dict[str | None, Frequencies]:
    """Return the frequencies of the start tokens, those before the extension, by layer type.

    Args:
        geometries: The layer types that change.
        before: Frequencies of the unpatched model.
    """
    frequencies = {}
    for layer_type in geometries.keys() & before.keys():
        start = Frequencies(
            geometries[layer_type].inv_freq(), geometries[layer_type].attention_factor
        )
        # The same bits as the unpatched model, where the two agree.
        frequencies[layer_type] = (
            before[layer_type] if start.close_to(before[layer_type]) else start
        )
    return frequencies


class StartTokenRotary:
    """A rotary module's forward that rotates positions below `tokens` by the base frequencies.

    A second module of the same class computes them, in the architecture's own layout (cos and sin,
    or complex numbers). It is not a submodule of the model, so casts do not reach it.
    """

    def __init__(
        self,
        original_forward: Any,
        start_module: nn.Module,
        layer_types: Iterable[str | None],
        tokens: int,
    ) -> None:
        self.original_forward = original_forward
        self.start_module = start_module
        self.layer_types = tuple(layer_types)
        self.tokens = tokens

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        extended = self.original_forward(x, position_ids, *args, **kwargs)
        layer_type = next(iter((*args, *kwargs.values())), None)  # whatever its name
        if layer_type not in self.layer_types and None not in self.layer_types:
            return extended
        if not torch.compiler.is_compiling():
            self._sync_device(x.device)
        start = self.start_module(x, position_ids, *args, **kwargs)
        first = position_ids < self.tokens
        if isinstance(extended, torch.Tensor):  # complex numbers, not cos and sin (Llama 4)
            return _select_by_position(first, start, extended)
        return tuple(_select_by_position(first, k, t) for k, t in zip(start, extended, strict=True))

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
        """Move the start module to the model's device; some forwards do not move themselves."""
        if next(self.start_module.buffers()).device != device:
            self.start_module.to(device)


def _select_by_position(
    first: torch.Tensor, start: torch.Tensor, extended: torch.Tensor
) -> torch.Tensor:
    first = first.to(extended.device).reshape(*first.shape, *[1] * (extended.ndim - first.ndim))
    return torch.where(first, start, extended)


def install_start_tokens(
    traits: RotaryTraits,
    geometries: dict[str | None, Geometry],
    tokens: int,
    undo_log: UndoLog,
) -> None:
    """Let the first tokens rotate as before the extension.

    Args:
        traits: Facts about one of the model's rotary modules.
        geometries: The layer types that change.
        tokens: Number of start tokens.
        undo_log: Log of the changes.
    """
    frequencies = start_frequencies(geometries, traits.frequencies)
    if not frequencies:
        return
    module: Any = traits.rotary.module
    attribute = forward_attribute(module)
    forward = StartTokenRotary(
        getattr(module, attribute), traits.probe_with(frequencies), frequencies, tokens
    )
    undo_log.set(module, attribute, forward)


@contextmanager
def preserve_start_keys(
    layers: list[torch.Tensor], at: torch.Tensor, tokens: int
) -> Iterator[None]:
    """Context manager: restore the start tokens' keys after an in-place re-rotation.

    Args:
        layers: Keys that are re-rotated in place, `[B, K, S, D]`.
        at: Their positions, `[B, S]`.
        tokens: Number of start tokens.
    """
    if not tokens:
        yield
        return
    rows, slots = (at < tokens).nonzero(as_tuple=True)
    rows, slots = rows.to(layers[0].device), slots.to(layers[0].device)
    saved = [keys[rows, :, slots] for keys in layers]  # `[N, K, D]`, copies
    yield
    for keys, start_keys in zip(layers, saved, strict=True):
        keys[rows, :, slots] = start_keys


def require_start_tokens_supported(
    method: Method,
    length: int | None,
    geometries: dict[str | None, Geometry],
    rotaries: list[RotaryTraits],
) -> None:
    """Raise if start tokens would have no effect or are not possible.

    Args:
        method: The requested method.
        length: The target length in tokens, or None.
        geometries: The layer types that change.
        rotaries: Facts about the model's rotary modules.

    Raises:
        ValueError: They would or are not. The message explains why.
    """
    tokens = method.start_token_count
    if not tokens:
        return
    trained = next(iter(geometries.values())).trained_length
    largest = min(trained, (length or trained + 1) - 1)
    if tokens > largest:
        raise Refused(
            f"start_tokens must be at most {largest:,}, within the trained length ({trained:,} "
            f"tokens) and below the target, got {tokens:,}: they keep the unextended rotation, "
            "which is trained no further"
        )
    inner = method
    if isinstance(inner, SoftmaxScaled):
        sharpening = inner.softmax_mscale(next(iter(geometries.values())))
        if abs(sharpening - inner.own_mscale) > 1e-6:
            raise Refused(
                "start_tokens keep their attention as it was, but this architecture has the "
                f"attention factor ({sharpening:.6g}) in its softmax scale, which knows no tokens: "
                "pass attention_factor=1, or leave start_tokens out"
            )
        inner = inner.inner
    if isinstance(inner, ContinuedScaling) and inner.short_frequencies:
        raise Refused(
            "start_tokens keep the rotation from before, but the config's own longrope has two of "
            "them, for short and for long sequences: leave start_tokens out, or pass "
            'start="unscaled"'
        )
    for traits in rotaries:
        frequencies = start_frequencies(geometries, traits.frequencies)
        if not frequencies:
            continue
        if traits.is_mrope:
            raise Refused(
                f"{type(traits.config).__name__} gives a token several positions (M-RoPE), so "
                f"{traits.name} knows no first tokens: leave start_tokens out"
            )
        traits.require_decoder()
        if not _probe_start_tokens(traits, frequencies, tokens):
            raise Refused(
                f"{traits.name} does not hand out one rotation for each position in the way that "
                "others do, so the first cannot be kept apart: leave start_tokens out"
            )


def _probe_start_tokens(
    traits: RotaryTraits, frequencies: dict[str | None, Frequencies], tokens: int
) -> bool:
    """Return whether start tokens work, by comparing a probe's rows with single rotations."""
    halved = {
        k: Frequencies(f.inv_freq / 2, 2 * f.attention_factor) for k, f in frequencies.items()
    }
    changed, plain = traits.probe_with(halved), traits.probe_with(frequencies)
    start_module = traits.probe_with(frequencies)
    combined = StartTokenRotary(changed.forward, start_module, frequencies, tokens)
    with torch.device("cpu"):
        x = torch.zeros(2, 3, 4)
        positions = torch.tensor([[tokens + 5, tokens - 1, tokens], [tokens, 2 * tokens, 0]])
    for layer_type in frequencies:
        extra = () if layer_type is None else (layer_type,)
        try:
            got, low, high = (as_tuple(f(x, positions, *extra)) for f in (combined, plain, changed))
            for row, column in positions.new_ones(2, 3).nonzero().tolist():
                expected = low if positions[row, column] < tokens else high
                for a, b in zip(got, expected, strict=True):
                    if not torch.equal(a[row, column], b[row, column]):
                        return False
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return False
    return True
