"""Compute a model's training loss in chunks of tokens, so that all logits never exist at once.

Logits are the largest tensor of a long training step: 65,536 tokens of a vocabulary of 128k take 34
GB in float32, and their gradient as much. So `install_loss` takes a causal language model and makes
it compute head and loss a few hundred tokens at a time. The decoder's forward stays transformers'
own: in training the head returns its input, and a replaced loss function multiplies it by the
head's weight.

A recipe's terms beside the cross-entropy (`Objective`) are computed from the same chunks of logits.
If the model computes all logits, cross-entropy and terms are computed from chunks of those.
`chunk_sums` computes the gradients in the forward pass, while a chunk's logits exist, and
multiplies them by the loss's own gradient in the backward pass.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from rope_patch.ops.modes import require_first_order
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    from rope_patch.training.objective.distillation import Distillation

logger = logging.getLogger("rope_patch")
LogitTransform = Callable[[torch.Tensor], torch.Tensor]
# (hidden [N, H], weight [V, H], targets [N], bias [V] or None) -> sum of losses
_LossSum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
IGNORED = -100  # the target of a token without a loss


def unchanged(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as they are: the transform of most models."""
    return logits


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


@dataclass(frozen=True)
class Chunk:
    """Logits of some of a batch's tokens, computed once for all terms.

    Attributes:
        logits: In float32 or float64, as the softmax sees them, `[N, V]`.
        targets: Each token's target, or `IGNORED`, `[N]`.
        rows: Where the tokens lie among those of the batch, `[B * S]`.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    rows: slice

    @cached_property
    def counted(self) -> torch.Tensor:
        """Return which tokens have a target, `[N]`."""
        return self.targets != IGNORED

    @cached_property
    def log_normalizer(self) -> torch.Tensor:
        """Return log Z, the logarithm of the softmax's denominator, `[N]`."""
        return self.logits.logsumexp(-1)

    def sum_counted(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of one value a token, over the tokens that have a target."""
        return torch.where(self.counted, values, 0).sum()


class Term(ABC):
    """A term that a recipe adds to the cross-entropy of its training loss.

    Attributes:
        name: The term's name in logs.
    """

    name: str

    @abstractmethod
    def total(self, chunk: Chunk) -> torch.Tensor:
        """Return the term's weighted sum over a chunk's tokens, with a gradient to its logits.

        The loss function divides it by the number of targets of the whole optimizer step, as it
        divides the cross-entropy. Use `chunk.log_normalizer` rather than a softmax of your own: the
        cross-entropy has computed it.
        """


class ZLoss(Term):
    """coefficient × (log Z)², the mean over all targets.

    Source: PaLM, arXiv:2204.02311, section 5 (with 1e-4); Olmo 3, arXiv:2512.13961, table 35 (with
    1e-5).

    Args:
        coefficient: The weight of the term.
    """

    name = "z_loss"

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def total(self, chunk: Chunk) -> torch.Tensor:
        """Return the weighted sum of squares; see `Term`."""
        return self.coefficient * chunk.sum_counted(chunk.log_normalizer.square())


def cross_entropy(chunk: Chunk) -> torch.Tensor:
    """Return the sum of a chunk's cross-entropies."""
    targets = chunk.targets.where(chunk.counted, 0)
    target_logits = chunk.logits.gather(-1, targets[:, None]).squeeze(-1)
    return chunk.sum_counted(chunk.log_normalizer - target_logits)


MIN_CHUNK = 128  # tokens; smaller products with the head are slow
# Function of a chunk: its sum over the tokens that have a target.
ChunkTotal = Callable[[Chunk], torch.Tensor]
COPIES = 5  # float32 tensors like a chunk's logits: logits, softmax, a product, and two gradients


def chunk_length(tokens: int, hidden: int, vocab: int, copies: int = COPIES) -> int:
    """Return the tokens of a chunk whose temporaries are about as large as the hidden states."""
    ideal = max(1, tokens * hidden // (vocab * copies))
    return min(tokens, max(MIN_CHUNK, 1 << (ideal.bit_length() - 1)))


def chunk_sums(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    terms: Sequence[Term],
    *,
    main: ChunkTotal = cross_entropy,
    transform: LogitTransform = unchanged,
    copies: int = COPIES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies and of all terms, and the terms' own sums.

    Args:
        rows: The head's input, `[N, H]`; the logits, `[N, V]`, without a weight.
        weight: The head's weight, `[V, H]`.
        bias: The head's bias, `[V]`.
        targets: `[N]`.
        terms: The terms beside the cross-entropy.
        main: What is summed in place of the cross-entropy: a function of a chunk.
        transform: What the model does with its head's output before that is its logits.
        copies: Temporaries of a chunk as large as its logits in float32.

    Returns:
        A scalar with a gradient to the first three, and the sums `[terms]` without.
    """
    functions = (main, *(term.total for term in terms))
    return _ChunkSums.apply(rows, weight, bias, targets, functions, transform, copies)


class _ChunkSums(torch.autograd.Function):
    """The sums, and their gradients to rows, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        functions: Sequence[ChunkTotal],
        transform: LogitTransform,
        copies: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the chunks, and compute the gradients."""
        tokens, width = rows.shape
        vocab = width if weight is None else weight.shape[0]
        wide = torch.promote_types(rows.dtype, torch.float32)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.empty_like(rows) if needs_rows else None
        # Chunks add up in float32: in 16 bits small ones would be lost.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        sums = torch.zeros(len(functions), dtype=wide, device=rows.device)
        length = chunk_length(tokens, width, vocab, copies)
        for start in range(0, tokens, length):
            part = slice(start, min(start + length, tokens))
            hidden = rows[part]
            logits = hidden if weight is None else torch.nn.functional.linear(hidden, weight, bias)
            logits = logits.detach().to(wide).requires_grad_()
            with torch.enable_grad():
                chunk = Chunk(transform(logits), targets[part], part)
                parts = torch.stack([function(chunk) for function in functions])
                (gradient,) = torch.autograd.grad(parts.sum(), logits)
            sums += parts.detach()
            del chunk, logits, parts
            gradient = gradient.to(rows.dtype)
            if grad_rows is not None:
                grad_rows[part] = gradient if weight is None else gradient @ weight
            if grad_weight is not None:
                if grad_weight.dtype == gradient.dtype:
                    grad_weight.addmm_(gradient.T, hidden)
                else:
                    grad_weight += gradient.T @ hidden
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
        ctx.gradients = [
            None if gradient is None else (gradient, source.dtype)
            for gradient, source in zip(
                (grad_rows, grad_weight, grad_bias), (rows, weight, bias), strict=True
            )
        ]
        shares = sums[1:].clone()
        ctx.mark_non_differentiable(shares)
        return sums.sum(), shares

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        """Multiply the gradients of the forward pass, in place."""
        require_first_order("the chunked loss", "take the model's own loss")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss has one backward pass: its gradients are used up")
        scaled = [
            None if entry is None else entry[0].mul_(gradient).to(entry[1]) for entry in gradients
        ]
        return *scaled, None, None, None, None
