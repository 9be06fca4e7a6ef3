"""Positions of generate's next token, known without reading them from a device.

A new token may have any position, so its position has to be read, which waits for the GPU.
transformers' own decoding loop extends its position_ids by the last one plus 1. So after the first
read, positions are certain as long as each step's tensor is the one that transformers made from the
previous step's tensor, and the decoder receives that very tensor. All other positions are read.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import MASK, POSITIONS
from rope_patch.transformers_api.generation import (
    PREPARE_INPUTS,
    UPDATE_ARGUMENTS,
    has_stock_step,
)


class _TensorSnapshot:
    """Identity and version of a tensor, to recognise it if nobody wrote into it since."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = _version(tensor)

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self._tensor() is tensor and self._version == _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class _Step:
    """One decoding step of generate.

    Attributes:
        source: What the step's positions were made from; see `_position_source`.
        position_ids: The positions that generate passes to the model, `[B, 1]` or `[A, B, 1]`.
        positions: The same positions as B numbers, where they are known; the highest of several
            axes.
        done: Whether the decoder had its forward.
    """

    source: _TensorSnapshot
    position_ids: _TensorSnapshot
    positions: list[float] | None
    done: bool = False


class GenerationLoop(threading.local):
    """State of the generate loop that calls a decoder in this thread."""

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._next: _TensorSnapshot | None = None

    def prepare(self, source: torch.Tensor | None, position_ids: torch.Tensor | None) -> None:
        """Note a step whose inputs generate has prepared."""
        last, expected_source = self._step, self._next
        self._step = self._next = None
        if source is None or position_ids is None or position_ids.shape[-1] != 1:
            return
        positions = None
        linked = expected_source is not None and expected_source.is_still(source)
        if linked and last is not None and last.positions:
            positions = [position + 1 for position in last.positions]
        self._step = _Step(_TensorSnapshot(source), _TensorSnapshot(position_ids), positions)

    def update(self, before: torch.Tensor | None, after: torch.Tensor | None, tokens: int) -> None:
        """Note the tensor that generate counts positions by, before and after a step extends it."""
        step, self._next = self._step, None
        if step is None or not step.done or before is None or after is None or tokens != 1:
            return
        if step.source.is_still(before):
            self._next = _TensorSnapshot(after)

    def take(self, position_ids: torch.Tensor | None) -> list[float] | None:
        """Return the positions of a decoder's forward if they are certain, else None.

        Args:
            position_ids: The forward's `position_ids`; None in a compiled graph, which has others.
        """
        step = self._step
        if (
            step is None
            or step.done
            or (position_ids is not None and not step.position_ids.is_still(position_ids))
        ):
            self._step = None
            return None
        step.done = True
        return step.positions

    def note_positions(self, positions: list[float]) -> None:
        """Note the positions of the present step; negative where a mask hides them."""
        if self._step is not None:
            self._step.positions = positions if min(positions) >= 0 else None


def watch_generate(
    model: nn.Module, length_hooks: list[tuple[nn.Module, Any, Any]], undo_log: UndoLog
) -> None:
    """Report each step of a model's generate to its `LengthHooks`.

    Does nothing for architectures that override how inputs are prepared.

    Args:
        model: The patched model, or a wrapper of it.
        length_hooks: Each decoder that follows lengths, its rotary module and its `LengthHooks`.
        undo_log: Log of the changes.
    """
    for decoder, _, hooks in length_hooks:
        for module in model.modules():
            stock = all(has_stock_step(module, name) for name in (PREPARE_INPUTS, UPDATE_ARGUMENTS))
            if stock and any(inner is decoder for inner in module.modules()):
                for name, wrapper in (
                    (PREPARE_INPUTS, _PrepareInputs),
                    (UPDATE_ARGUMENTS, _UpdateModelKwargs),
                ):
                    undo_log.set(module, name, wrapper(getattr(module, name), hooks))


def _position_source(model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that generate extends: position_ids, else the attention mask."""
    positions = model_kwargs.get(POSITIONS)
    return model_kwargs.get(MASK) if positions is None else positions


class WrappedMethod:
    """Wrapper of a model's method that keeps the method's signature."""

    def __init__(self, original_method: Any, hooks: Any) -> None:
        self.original_method = original_method
        self.hooks = hooks

    @property
    def __signature__(self) -> inspect.Signature:
        # generate reads the arguments that the model accepts from it.
        return inspect.signature(self.original_method)


class _PrepareInputs(WrappedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self.original_method(*args, **kwargs)
        self.hooks.generation_loop.prepare(_position_source(kwargs), inputs.get(POSITIONS))
        return inputs


class _UpdateModelKwargs(WrappedMethod):
    def __call__(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        before = _position_source(model_kwargs)
        updated = self.original_method(outputs, model_kwargs, *args, **kwargs)
        tokens = args[1] if len(args) > 1 else kwargs.get("num_new_tokens", 1)
        self.hooks.generation_loop.update(before, _position_source(updated), tokens)
        return updated
