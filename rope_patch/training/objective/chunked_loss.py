"""Compute a model's training loss in chunks of tokens, so that all logits never exist at once.

Logits are the largest tensor of a long training step: 65,536 tokens of a vocabulary of 128k take 34
GB in float32, and their gradient as much. So `install_loss` takes a causal language model and makes
it compute head and loss a few hundred tokens at a time. The decoder's forward stays transformers'
own: in training the head returns its input, and a replaced loss function multiplies it by the
head's weight.

A recipe's terms beside the cross-entropy (`Objective`) are computed from the same chunks of logits.
If the model computes all logits, cross-entropy and terms are computed from chunks of those.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rope_patch.patching.undo_log import UndoLog
from rope_patch.training.objective.chunk_sums import (
    IGNORED,
    LogitTransform,
    Term,
    chunk_sums,
    unchanged,
)
from rope_patch.training.objective.distillation import Distillation
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

# (hidden [N, H], weight [V, H], targets [N], bias [V] or None) -> sum of losses
_LossSum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def install_loss(
    model: nn.Module, loss: str, objective: Objective | None = None
) -> tuple[str, UndoLog]:
    """Make a causal language model compute its training loss in chunks, with a recipe's terms.

    Args:
        model: The model before accelerate wraps it; PEFT may wrap it already.
        loss: "full", "torch", "liger", or "auto": torch's, but "full" if this torch has none or
            the model changes its logits after the head (soft caps, scales).
        objective: The terms beside the cross-entropy, which are recorded there; None for none.

    Returns:
        The loss in use, and the undo log of the changes to the model.

    Raises:
        ValueError: The named loss is not available here.
    """
    swaps = UndoLog()
    objective = Objective() if objective is None else objective
    distillation = objective.distillation
    causal = _unwrap_peft(model)
    head = causal.get_output_embeddings()
    if loss == "full" and distillation is None:
        _add_terms(swaps, causal, head, objective)
        return loss, swaps
    inputs: list[torch.Tensor] = []
    swaps.set(head, "forward", _pass_hidden_states(head, inputs))
    transform = find_transform(causal, head)
    name = "torch" if loss == "auto" else loss
    problem = None if name == "full" else _unavailable_reason(name, objective)
    if problem is None and name != "full" and transform is not unchanged:
        problem = (
            f"{type(causal).__name__} does more with its logits behind its head than to compute "
            "transformers' loss, such as capping them, which chunks of tokens do not go through"
        )
    if problem is not None:
        if loss != "auto":
            swaps.undo()
            raise ValueError(f"loss: {loss} cannot be had: {problem}; expected loss: full")
        logger.info("all logits are computed at once: %s", problem)
        name = "full"
        if distillation is None:
            swaps.undo()
            _add_terms(swaps, causal, head, objective)
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
    total = _full_loss_sum(transform) if name == "full" else _LOSS_SUMS[name]
    loss_function = _chunked_loss_function(
        head, None if objective.terms else total, objective, inputs, transform
    )
    swaps.set(causal, "_loss_function", loss_function)
    return name, swaps


def _unwrap_peft(model: nn.Module) -> Any:
    """Return the causal language model inside PEFT's wrapper, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _add_terms(swaps: UndoLog, causal: Any, head: nn.Module, objective: Objective) -> None:
    """Make a model that computes all logits add the terms; raise if it computes its own loss."""
    if not objective.terms:
        return
    swaps.set(causal, "_loss_function", _chunked_loss_function(head, None, objective))
    if not _logits_reach_loss(causal):
        swaps.undo()
        names = ", ".join(term.name for term in objective.terms)
        raise ValueError(
            f"{names} cannot be added: {type(causal).__name__} computes a loss of its own instead "
            f"of transformers'; leave {names} out"
        )


def _logits_reach_loss(causal: Any) -> bool:
    """Return whether the model calls its loss function, once, with logits."""
    tensors: list[torch.Tensor] = []
    probe_loss(causal, None, tensors.append)
    return len(tensors) == 1


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


def _unavailable_reason(name: str, objective: Objective) -> str | None:
    """Return why a loss is not available here, or None."""
    names = ", ".join(term.name for term in objective.terms)
    if name == "torch" and not names and not hasattr(functional, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if name == "liger":
        if names:
            return f"Liger's kernel computes no {names} here, which loss: torch does"
        if not torch.cuda.is_available():
            return "Liger's kernels need a GPU"
        try:
            import liger_kernel  # noqa: F401
        except ImportError:
            return "liger-kernel is not installed (pip install liger-kernel)"
    return None


def _chunked_loss_function(
    head: nn.Module,
    total_loss: _LossSum | None,
    objective: Objective,
    inputs: list[torch.Tensor] | None = None,
    transform: LogitTransform = unchanged,
) -> Callable[..., torch.Tensor]:
    """Return a training loss in the form of transformers' loss functions."""
    # Without `inputs`, where the head leaves its input in training, it computes logits. Without
    # `total_loss`, a sum of cross-entropies, the chunks compute it together with the terms.
    whole = inputs is None

    def language_sums(
        rows: torch.Tensor, weight: Any, targets: torch.Tensor, bias: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses and terms of some tokens, and the terms' own."""
        if total_loss is not None:
            return total_loss(rows, weight, targets, bias), rows.new_zeros(0)
        return chunk_sums(rows, weight, bias, targets, objective.terms, transform=transform)

    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if head.training and inputs is not None:
            logits = inputs.pop()  # the model may have capped or scaled what it took for logits
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        rows: torch.Tensor = logits.flatten(0, -2)
        count = num_items_in_batch
        if count is None:
            count = (targets != ignore_index).sum()
        count = count.to(rows.device) if torch.is_tensor(count) else count
        if not head.training:
            return (
                functional.cross_entropy(
                    rows.float(), targets, ignore_index=ignore_index, reduction="sum"
                )
                / count
            )
        weight: Any = None if whole else head.weight
        bias = None if whole else getattr(head, "bias", None)
        device_type = rows.device.type
        if torch.is_autocast_enabled(device_type) and not whole:
            # Autocast does not know these functions, so cast here what it would cast.
            dtype = torch.get_autocast_dtype(device_type)
            rows, weight = rows.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        targets = targets.masked_fill(targets == ignore_index, IGNORED)
        with torch.autocast(device_type, enabled=False):
            if objective.distillation is None:
                summed, shares = language_sums(rows, weight, targets, bias)
            else:
                summed, shares = objective.distillation.sums(
                    language_sums,
                    rows.unflatten(0, shift_labels.shape),
                    weight,
                    targets.view(shift_labels.shape),
                    bias,
                    objective.terms,
                )
        objective.record(shares / count)
        return summed / count

    return loss_function


def _full_loss_sum(transform: LogitTransform) -> _LossSum:
    def loss_sum(hidden: Any, weight: Any, targets: Any, bias: Any) -> torch.Tensor:
        logits = functional.linear(hidden, weight, bias)
        logits = transform(logits.to(torch.promote_types(logits.dtype, torch.float32)))
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


class Objective:
    """A recipe's terms beside the cross-entropy, and their values since they were last read.

    Args:
        terms: The terms.
        distillation: What takes the cross-entropy's place in distilled rows, or None.

    Attributes:
        terms: The terms.
        distillation: The distillation.
    """

    def __init__(
        self, terms: Iterable[Term] = (), distillation: Distillation | None = None
    ) -> None:
        self.terms, self.distillation = list(terms), distillation
        self._values: list[torch.Tensor] = []  # per forward pass, [terms]

    def record(self, values: torch.Tensor) -> None:
        """Record each term's share of the loss of one forward pass, `[terms]`."""
        self._values.append(values.detach())

    def read(self, accelerator: Any, reduction: str = "sum") -> dict[str, float]:
        """Return each term's share of a step's loss by name, over all processes, and forget it.

        Args:
            accelerator: accelerate's Accelerator; every process must call this.
            reduction: "sum" if losses are divided by the targets of all processes, "mean" if by
                those of each.
        """
        distilled = {} if self.distillation is None else self.distillation.step_metrics()
        if not self.terms:
            return distilled
        total = torch.stack(self._values).sum(0)
        self._values = []
        values = accelerator.reduce(total, reduction=reduction).tolist()
        shares = {term.name: value for term, value in zip(self.terms, values, strict=True)}
        return shares | distilled
