"""Self-distillation: short rows are trained to predict as the original model does.

A rotation for long texts changes what a model says of short ones. Where a text is within the
trained length the original model is right by definition, so its whole distribution is the target,
rather than the one token that follows.

Sources: Arcee's AFM-4.5B was brought back at short lengths by distillation from itself before the
extension (arcee.ai/blog/extending-afm-4-5b-to-64k-context-length). Divergence and temperature are
those of arXiv:1503.02531.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rope_patch.patching.undo_log import UndoLog
from rope_patch.pretrained.loading import load, read_model
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.training.objective.chunk_sums import (
    IGNORED,
    Chunk,
    LogitTransform,
    Term,
    chunk_sums,
    unchanged,
)
from rope_patch.training.optimizer import mixed_precision

# Tensors as large as a chunk's logits in float32 that exist at once: logits, softmaxes, products
# and gradients of both models.
DISTILLATION_COPIES = 10
DISTILLED = "distilled"  # a batch's key for which of its rows are distilled, `[B]` bool


def divergence(
    logits: torch.Tensor, original_logits: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return KL(original || trained) of each token, `[n]`, times the temperature's square.

    The square keeps the size of the gradients.

    Args:
        logits: The trained model's, `[n, V]`, at least float32.
        original_logits: The original model's.
        temperature: Divisor of both.
    """
    trained = functional.log_softmax(logits / temperature, dim=-1)
    original = functional.log_softmax(original_logits / temperature, dim=-1)
    each = functional.kl_div(trained, original, reduction="none", log_target=True)
    return each.sum(-1) * temperature**2


def mark_distilled(batch: dict[str, Any]) -> dict[str, Any]:
    """Add which rows of a batch are distilled: the short ones."""
    return batch | {DISTILLED: torch.tensor([row["short"] for row in batch["rows"]])}


class Distillation:
    """The distillation of a run: the original model, the batch at hand, and a step's sums.

    Args:
        teacher: The original model.
        weight: Weight of the divergence.
        temperature: Divisor of both models' logits.

    Attributes:
        transform: What both models do with their heads' outputs.
    """

    def __init__(self, teacher: Teacher, weight: float, temperature: float) -> None:
        self.teacher, self.weight, self.temperature = teacher, weight, temperature
        self.transform: LogitTransform = unchanged
        self._rows: list[int] = []
        self._original: torch.Tensor | None = None
        # A step's sums of losses and of divergences, and their numbers of tokens.
        self._sums: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def to_device(self, accelerator: Any, copies: int = 1) -> None:
        """Move the original model to this process's device.

        Args:
            accelerator: accelerate's Accelerator.
            copies: Processes that compute the same rows.
        """
        self._accelerator, self._copies = accelerator, copies
        device = accelerator.device
        self._sums = [torch.zeros((), device=device) for _ in range(2)]
        self._counts = [torch.zeros((), dtype=torch.long, device=device) for _ in range(2)]
        self.teacher.to_device(accelerator)

    @contextlib.contextmanager
    def teacher_forward(self, batch: dict[str, Any]) -> Iterator[None]:
        """Run the original model on a batch's distilled rows, for the loss within the block.

        Args:
            batch: The micro-batch; its key `distilled` is removed.
        """
        flags = batch.pop(DISTILLED).tolist()
        self._rows = [row for row, is_distilled in enumerate(flags) if is_distilled]
        ids, positions = batch["input_ids"], batch["position_ids"]
        joins_sharded_forward = self._joins_sharded_forward(ids.device)
        if self._rows:
            self._original = self.teacher.read(ids[self._rows], positions[self._rows])
        elif joins_sharded_forward:
            self.teacher.read(ids[:1, :1], positions[:1, :1])
        try:
            yield
        finally:
            self._rows, self._original = [], None

    def sums(
        self,
        language_sums: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        terms: Sequence[Term],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch's sum of losses, and that of each term.

        Args:
            language_sums: Returns both sums of the rows that are not distilled, given `hidden`
                `[N, H]`, weight, targets `[N]` and bias.
            hidden: The head's inputs, `[B, S, H]`.
            weight: The head's weight, `[V, H]`.
            targets: The next tokens, `[B, S]`, or `IGNORED`.
            bias: The head's bias, or None.
            terms: The terms beside cross-entropy or divergence.
        """
        distilled = self._rows
        others = [row for row in range(len(hidden)) if row not in distilled]
        parts = []
        for which, rows in enumerate((others, distilled)):
            if not rows:
                continue
            here: Any = slice(None) if len(rows) == len(hidden) else rows
            chosen, chosen_targets = hidden[here].flatten(0, 1), targets[here].flatten()
            if which == 0:
                total, shares = language_sums(chosen, weight, chosen_targets, bias)
            else:
                total, shares = chunk_sums(
                    chosen,
                    weight,
                    bias,
                    chosen_targets,
                    terms,
                    main=self._divergence_from(self._take_original(chosen.dtype)),
                    transform=self.transform,
                    copies=DISTILLATION_COPIES,
                )
            self._sums[which] += total.detach() - shares.sum()
            self._counts[which] += (chosen_targets != IGNORED).sum()
            parts.append((total, shares))
        if len(parts) == 1:
            return parts[0]
        (total, shares), (other_total, other_shares) = parts
        return total + other_total, shares + other_shares

    def step_metrics(self) -> dict[str, float]:
        """Return the means over a step's tokens on all processes, and start the next step.

        Returns:
            `language_loss` of the rows that are not distilled and `distillation_loss` of those
            that are, each unless there were none, and `distillation_tokens`.
        """
        sums, counts = (
            self._accelerator.reduce(torch.stack(values), reduction="sum").tolist()
            for values in (self._sums, self._counts)
        )
        for value in (*self._sums, *self._counts):
            value.zero_()
        sums[1] /= self.weight
        names = ("language_loss", "distillation_loss")
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        return {**means, "distillation_tokens": counts[1] // self._copies}

    def _take_original(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any, Any]:
        """Return the original model's hidden states `[N, H]`, and its head's weight and bias."""
        assert self._original is not None
        original, self._original = self._original.flatten(0, 1).to(dtype), None
        return (original, *self.teacher.head_weights(dtype))

    def _divergence_from(
        self, original: tuple[torch.Tensor, Any, Any]
    ) -> Callable[[Chunk], torch.Tensor]:
        hidden, weight, bias = original

        def total(chunk: Chunk) -> torch.Tensor:
            with torch.no_grad():
                logits = functional.linear(hidden[chunk.rows], weight, bias)
                logits = self.transform(logits.to(chunk.logits.dtype))
            each = divergence(chunk.logits, logits, self.temperature)
            return self.weight * chunk.sum_counted(each)

        return total

    def _joins_sharded_forward(self, device: torch.device) -> bool:
        """Return whether this process must run a sharded original model: any has distilled rows."""
        if not self.teacher.is_sharded:
            return False
        # A forward of one process needs the shards of all others.
        rows = torch.tensor(len(self._rows), device=device)
        return bool(self._accelerator.reduce(rows, reduction="sum"))


class Teacher:
    """A frozen model that returns its head's inputs, from which logits are made in chunks.

    Args:
        model: The model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False).eval()
        self.head: nn.Module = model.get_output_embeddings()
        self._hidden: torch.Tensor | None = None
        self._swaps = UndoLog()
        self._swaps.set(self.head, "forward", self._keep_hidden)

    def to_device(self, accelerator: Any) -> None:
        """Move the model to the process's device; under FSDP2, shard it like the trained one."""
        self._accelerator = accelerator
        self.is_sharded = bool(getattr(accelerator, "is_fsdp2", False))
        if self.is_sharded:
            from accelerate.utils import fsdp2_prepare_model

            fsdp2_prepare_model(accelerator, self.model)
        else:
            self.model.to(accelerator.device)

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the head's inputs `[B, S, H]`.

        Args:
            input_ids: Tokens, `[B, S]`.
            position_ids: Their positions, which start anew at each document, `[B, S]`.
        """
        with self._accelerator.autocast():
            self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    def head_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's weight and bias, whole and of a dtype."""
        bias: Any = getattr(self.head, "bias", None)
        weight, bias = (_whole(t, dtype) for t in (self.head.weight, bias))
        return weight, bias

    def _keep_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden = hidden
        return hidden


def shares_teacher_weights(settings: Any) -> bool:
    """Return whether the original model computes with the tensors of the trained one.

    LoRA leaves the weights as loaded. FSDP replaces them by shards, so the original model is
    sharded on its own there.
    """
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return settings.extension.lora_rank > 0 and not fsdp


def teacher_dtype(settings: Any) -> torch.dtype:
    """Return the dtype of an original model with weights of its own: that of matrix products."""
    is_bf16 = mixed_precision(settings.training) == "bf16"
    dtype: torch.dtype = torch.bfloat16 if is_bf16 else getattr(torch, settings.extension.dtype)
    return dtype


def load_teacher(
    path: Any, student: nn.Module, *, shares_weights: bool, **load_options: Any
) -> Any:
    """Load the model that a recipe begins with, without the recipe's patch.

    A folder that `rope_patch.save` wrote is rotated as recorded there, as its weights were trained.

    Args:
        path: The recipe's model.
        student: The recipe's model as loaded, without adapters.
        shares_weights: Whether the student's weights stay as loaded, so that the teacher computes
            with the same tensors.
        **load_options: Arguments of `from_pretrained`.
    """
    with torch.random.fork_rng(devices=[]):  # the run's random numbers are those without a teacher
        model = (read_model if patch_to_restore(path) is None else load)(path, **load_options)
    if shares_weights:
        share_weights(model, dict(student.named_parameters(remove_duplicate=False)))
    model.config.use_cache = False
    return model


def share_weights(model: nn.Module, originals: dict[str, nn.Parameter]) -> None:
    """Replace a model's parameters by given ones of the same names, tied ones included."""
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, originals[name])


def _whole(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of a dtype, gathered from all processes if it is sharded."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).to(dtype)
