"""Chunked cross-entropy inside the model's own forward, without all logits at once.

Logits are the largest tensor of a long training step: 65,536 tokens of a vocabulary of 128k take 34
GB in float32, and their gradient as much. The head and the loss are therefore computed a few
hundred tokens at a time. The decoder's forward stays transformers' own: in training the head
returns its input, and a replaced loss function multiplies it by the head's weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rope_patch.patching.undo_log import UndoLog
from rope_patch.training.objective.chunks import widen
from rope_patch.training.objective.distillation import Distillation
from rope_patch.training.objective.logit_transform import (
    LogitTransform,
    find_transform,
    unchanged,
)
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

# (hidden [N, H], weight [V, H], targets [N], bias [V] or None) -> sum of losses
_LossSum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def install_loss(
    model: nn.Module,
    loss: str,
    distillation: Distillation | None = None,
) -> tuple[str, UndoLog]:
    """Make a causal language model compute its training loss in chunks.

    Args:
        model: The model before accelerate wraps it; PEFT may wrap it already.
        loss: "full", "torch", "liger", or "auto": torch's, but "full" if this torch has none or
            the model changes its logits after the head (soft caps, scales).
        distillation: Takes the place of the loss in distilled rows, in chunks with each of them.

    Returns:
        The loss in use, and the undo log of the changes to the model.

    Raises:
        ValueError: The named loss is not available here, or the model's logits cannot be distilled.
    """
    swaps = UndoLog()
    if loss == "full" and distillation is None:
        return loss, swaps
    causal = unwrap_peft(model)
    head = causal.get_output_embeddings()
    inputs: list[torch.Tensor] = []
    swaps.set(head, "forward", _pass_hidden_states(head, inputs))
    transform = find_transform(causal, head)
    name = "torch" if loss == "auto" else loss
    problem = None if name == "full" else _unavailable_reason(name)
    if problem is None and name != "full" and transform is not unchanged:
        problem = (
            f"{type(causal).__name__} does more with its logits behind its head than to compute "
            "transformers' loss, such as capping them, which chunks of tokens do not go through"
        )
    if problem is not None and loss != "auto":
        swaps.undo()
        raise ValueError(f"loss: {loss} cannot be had: {problem}; expected loss: full")
    if problem is not None:
        logger.info("all logits are computed at once: %s", problem)
        name = "full"
        if distillation is None:
            swaps.undo()
            return name, swaps
    if transform is None:
        swaps.undo()
        raise Refused(
            f"distillation_weight: {type(causal).__name__} does more with its logits behind its "
            "head than to cap or to scale them, which chunks of tokens do not go through: leave "
            "distillation_weight out"
        )
    if distillation is not None:
        distillation.transform = transform
    loss_sum = _full_loss_sum(transform) if name == "full" else _LOSS_SUMS[name]
    loss_function = _chunked_loss_function(head, inputs, loss_sum, distillation)
    swaps.set(causal, "_loss_function", loss_function)
    return name, swaps


def _full_loss_sum(transform: LogitTransform) -> _LossSum:
    def loss_sum(hidden: Any, weight: Any, targets: Any, bias: Any) -> torch.Tensor:
        logits = transform(widen(functional.linear(hidden, weight, bias)))
        return functional.cross_entropy(logits, targets, reduction="sum")

    return loss_sum


def _torch_loss_sum(hidden: Any, weight: Any, targets: Any, bias: Any) -> torch.Tensor:
    # In 16 bits torch would round the sum as well; rounded per-token losses have no bias.
    sums = hidden.dtype == torch.float32
    losses = functional.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        reduction="sum" if sums else "none",
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return losses if sums else losses.float().sum()


def _liger_loss_sum(hidden: Any, weight: Any, targets: Any, bias: Any) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, targets, bias, reduction="sum")


_LOSS_SUMS: dict[str, _LossSum] = {"torch": _torch_loss_sum, "liger": _liger_loss_sum}


def _unavailable_reason(name: str) -> str | None:
    """Return why a loss is not available here, or None."""
    if name == "torch" and not hasattr(functional, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if name == "liger":
        if not torch.cuda.is_available():
            return "Liger's kernels need a GPU"
        try:
            import liger_kernel  # noqa: F401
        except ImportError:
            return "liger-kernel is not installed (pip install liger-kernel)"
    return None


def unwrap_peft(model: nn.Module) -> Any:
    """Return the causal language model inside PEFT's wrapper, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _pass_hidden_states(
    head: nn.Module, inputs: list[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that passes its input on in training, and leaves it in a list."""
    plain = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not head.training:
            return plain(hidden)
        inputs[:] = [hidden]
        return hidden

    return forward


def _chunked_loss_function(
    head: nn.Module,
    inputs: list[torch.Tensor],
    total_loss: _LossSum,
    distillation: Distillation | None,
) -> Callable[..., torch.Tensor]:
    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if not head.training:
            logits = logits.float()
            total: _LossSum = lambda rows, _w, targets, _b: functional.cross_entropy(  # noqa: E731
                rows, targets, ignore_index=ignore_index, reduction="sum"
            )
        else:
            total = total_loss
            logits = inputs.pop()  # the model may have capped or scaled what it took for logits
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        hidden, targets = logits.flatten(0, -2), shift_labels.reshape(-1)
        weight: Any = head.weight
        bias = getattr(head, "bias", None)
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            # Autocast does not know these functions, so cast here what it would cast.
            dtype = torch.get_autocast_dtype(device_type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device_type, enabled=False):
            if distillation is not None and head.training:
                rows = hidden.unflatten(0, shift_labels.shape)
                summed = distillation.loss_sum(total, rows, weight, shift_labels, bias)
            else:
                summed = total(hidden, weight, targets, bias)
        count = num_items_in_batch
        if count is None:
            count = (targets != ignore_index).sum()
        return summed / (count.to(summed.device) if torch.is_tensor(count) else count)

    return loss_function
