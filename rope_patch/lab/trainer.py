"""Training of one cell, which a kill interrupts at most by some steps."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rope_patch.lab.task import Task
from rope_patch.utils.atomic_files import atomic_write

LEARNING_RATE = 3e-3
_WARMUP, _DECAY = 0.05, 0.3  # shares of the steps in which the rate rises from and falls to zero
CHECKPOINT_STEPS = 50
_POINTS = 40  # of the recorded training loss


class Trainer:
    """Trains a model on a task with AdamW.

    A run that continues from a checkpoint ends with the same weights, bit for bit.

    Attributes:
        model: The model, changed in place.
        task: Its task.
        steps: Optimizer steps.
        losses: Mean training loss of each stretch of steps so far.
    """

    def __init__(self, model: Any, task: Task, steps: int, seed: int, identity: Any) -> None:
        self.model, self.task, self.steps = model, task, steps
        self.losses: list[float] = []
        self._identity = identity
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._recent: list[float] = []
        self._step = 0

    def train(self, checkpoint: Path, report: Callable[[int], object]) -> None:
        """Train to the last step, from the checkpoint if there is one.

        Args:
            checkpoint: The file of the checkpoint; one that is damaged, or of another training,
                is passed over.
            report: Called with the tokens of each step, those of a checkpoint at once.
        """
        self._restore(checkpoint)
        report(sum(self.task.tokens(step) for step in range(self._step)))
        self.model.train()
        every = max(1, self.steps // _POINTS)
        while self._step < self.steps:
            self._recent.append(self._train_step())
            if self._step % every == 0 or self._step == self.steps:
                self.losses.append(round(sum(self._recent) / len(self._recent), 5))
                self._recent.clear()
            if self._step % CHECKPOINT_STEPS == 0 or self._step == self.steps:
                self._save(checkpoint)
            report(self.task.tokens(self._step - 1))
        self.model.eval()

    def _train_step(self) -> float:
        done = self._step / self.steps
        rise = (self._step + 1) / max(1.0, _WARMUP * self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, rise, (1 - done) / _DECAY)
        input_ids, labels = self.task.batch(self._generator, self._step)
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._step += 1
        return loss.item()

    def _save(self, checkpoint: Path) -> None:
        state = {
            "identity": self._identity,
            "step": self._step,
            "losses": self.losses,
            "recent": self._recent,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        atomic_write(checkpoint, buffer.getvalue())

    def _restore(self, checkpoint: Path) -> None:
        try:
            state = torch.load(checkpoint, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
            return
        if state.get("identity") != self._identity:
            return
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._step = state["step"]
        self.losses, self._recent = list(state["losses"]), list(state["recent"])
