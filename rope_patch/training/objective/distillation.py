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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from rope_patch.training.objective.chunk_sums import chunk_sums
from rope_patch.training.objective.logit_transform import LogitTransform, unchanged
from rope_patch.training.objective.teacher import Teacher
from rope_patch.training.objective.terms import IGNORED, Chunk, Term

COPIES = 10  # of a chunk's logits in float32: both models', their softmaxes, products, gradients
DISTILLED = "distilled"  # key of a batch: which rows are distilled, `[B]` bool


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
        self._sums: list[torch.Tensor] = []  # of losses, divergences
        self._counts: list[torch.Tensor] = []  # of their tokens

    def place(self, accelerator: Any, copies: int = 1) -> None:
        """Move the original model to this process's device.

        Args:
            accelerator: accelerate's Accelerator.
            copies: Processes that compute the same rows.
        """
        self._accelerator, self._copies = accelerator, copies
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
            language_sums: The same of rows that are not distilled, given `hidden` `[N, H]`, weight,
                targets `[N]` and bias.
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
                    copies=COPIES,
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

    def _any_process_reads(self, device: torch.device) -> bool:
        """Return whether a process has distilled rows, if the original model is sharded."""
        if not self.teacher.is_sharded:
            return False
        rows = torch.tensor(len(self._rows), device=device)
        return bool(self._accelerator.reduce(rows, reduction="sum"))
