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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from rope_patch.training.objective.chunks import chunked_sum, widen
from rope_patch.training.objective.logit_transform import LogitTransform, unchanged
from rope_patch.training.objective.teacher import Teacher

IGNORED = -100  # label without a loss
DISTILLED = "distilled"  # key of a batch: which rows are distilled, `[B]` bool


def divergence(
    logits: torch.Tensor, original_logits: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return KL(original || trained), summed over tokens, times the temperature's square.

    The square keeps the size of the gradients.

    Args:
        logits: The trained model's, `[n, V]`, at least float32.
        original_logits: The original model's.
        temperature: Divisor of both.
    """
    trained = functional.log_softmax(logits / temperature, dim=-1)
    original = functional.log_softmax(original_logits / temperature, dim=-1)
    each = functional.kl_div(trained, original, reduction="sum", log_target=True)
    return each * temperature**2


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
        self._sums: list[torch.Tensor] = []  # of losses, divergences
        self._counts: list[torch.Tensor] = []  # of their tokens

    def place(self, accelerator: Any) -> None:
        """Move the original model to this process's device."""
        self._accelerator = accelerator
        device = accelerator.device
        self._sums = [torch.zeros((), device=device) for _ in range(2)]
        self._counts = [torch.zeros((), dtype=torch.long, device=device) for _ in range(2)]
        self.teacher.place(accelerator)

    @contextlib.contextmanager
    def reading(self, batch: dict[str, Any]) -> Iterator[None]:
        """Let the original model read a batch's distilled rows, for the loss within the block.

        Args:
            batch: The micro-batch; its key `distilled` is removed.
        """
        flags = batch.pop(DISTILLED).tolist()
        self._rows = [row for row, is_distilled in enumerate(flags) if is_distilled]
        ids, positions = batch["input_ids"], batch["position_ids"]
        any_process_reads = self._any_process_reads(ids.device)
        if self._rows:
            self._original = self.teacher.read(ids[self._rows], positions[self._rows])
        elif any_process_reads:  # they need this process's shards
            self.teacher.read(ids[:1, :1], positions[:1, :1])
        try:
            yield
        finally:
            self._rows, self._original = [], None

    def loss_sum(
        self,
        language_loss: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a batch's sum of losses: the text's in most rows, divergences in distilled ones.

        Args:
            language_loss: Sum of the losses of `hidden` `[N, H]` and targets `[N]`; takes what
                this function takes.
            hidden: The head's inputs, `[B, S, H]`.
            weight: The head's weight, `[V, H]`.
            targets: The next tokens, `[B, S]`, or `IGNORED`.
            bias: The head's bias, or None.
        """
        others = [row for row in range(len(hidden)) if row not in self._rows]
        parts = []
        if others:
            kept = slice(None) if not self._rows else others
            kept_targets = targets[kept].flatten()
            loss = language_loss(hidden[kept].flatten(0, 1), weight, kept_targets, bias)
            self._add(0, loss, (kept_targets != IGNORED).sum())
            parts.append(loss)
        if self._rows:
            # Only tokens with a target count: no padding, no borders of documents.
            tokens = (targets[self._rows].flatten() != IGNORED).nonzero().squeeze(1)
            summed = self._divergence(
                hidden[self._rows].flatten(0, 1)[tokens], weight, bias, tokens
            )
            self._add(1, summed, tokens.new_tensor(len(tokens)))
            parts.append(self.weight * summed)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def step_metrics(self, copies: int = 1) -> dict[str, float]:
        """Return the means over a step's tokens on all processes, and start the next step.

        Args:
            copies: Processes that compute the same rows.

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
        names = ("language_loss", "distillation_loss")
        means = {n: s / c for n, s, c in zip(names, sums, counts, strict=True) if c}
        return {**means, "distillation_tokens": counts[1] // copies}

    def _divergence(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        assert self._original is not None
        original = self._original.flatten(0, 1)[tokens].to(hidden.dtype)
        self._original = None
        original_weight, original_bias = self.teacher.head_weights(hidden.dtype)

        def term(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            target = functional.linear(original[chunk], original_weight, original_bias)
            return divergence(
                self.transform(logits), self.transform(widen(target)), self.temperature
            )

        return chunked_sum(term, hidden, weight, bias)

    def _add(self, which: int, loss: torch.Tensor, count: torch.Tensor) -> None:
        self._sums[which] += loss.detach()
        self._counts[which] += count

    def _any_process_reads(self, device: torch.device) -> bool:
        """Return whether a process has distilled rows, if the original model is sharded."""
        if not self.teacher.is_sharded:
            return False
        rows = torch.tensor(len(self._rows), device=device)
        return bool(self._accelerator.reduce(rows, reduction="sum"))
