"""What a model does with its head's output before that is its logits: soft caps and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rope_patch.patching.undo_log import UndoLog

LogitTransform = Callable[[torch.Tensor], torch.Tensor]


def unchanged(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as they are: the transform of most models."""
    return logits


def find_transform(causal: Any, head: nn.Module) -> LogitTransform | None:
    """Return what a model does with its head's output, or None if that is something else.

    The model's forward decides: each candidate is compared with what reaches the loss function.

    Args:
        causal: The causal language model.
        head: Its head, whose forward returns its input while it is in training mode.
    """
    tensors: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda _, __, output: tensors.append(output))
    try:
        probe_loss(causal, head, tensors.append)
    finally:
        hook.remove()
    if len(tensors) == 2:
        for transform in _candidates(causal.config.get_text_config(decoder=True)):
            if torch.equal(transform(tensors[0]), tensors[1]):
                return transform
    return None


def _candidates(config: Any) -> Iterator[LogitTransform]:
    yield unchanged
    cap, factor, divisor = (
        getattr(config, name, None)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    # The order of operations is transformers', so that the probe's numbers are equal.
    if cap:
        yield lambda logits: torch.tanh(logits / cap) * cap
    if factor:
        yield lambda logits: logits * factor
    if divisor:
        yield lambda logits: logits / divisor


@torch.no_grad()
def probe_loss(
    causal: Any, head: nn.Module | None, observe: Callable[[torch.Tensor], None]
) -> None:
    """Call a model on eight tokens, with a loss function that only observes its logits.

    Args:
        causal: The causal language model.
        head: The module to put into training mode, if any.
        observe: Called with what the loss function gets.
    """
    ids = torch.ones(1, 8, dtype=torch.long, device=causal.get_input_embeddings().weight.device)
    modes = [(module, module.training) for module in causal.modules()]
    swaps = UndoLog()
    swaps.set(causal, "_loss_function", lambda logits, *_, **__: observe(logits))
    try:
        causal.eval()
        if head is not None:
            head.train()
        causal(input_ids=ids, labels=ids, use_cache=False)
    finally:
        swaps.undo()
        for module, training in modes:
            module.training = training
