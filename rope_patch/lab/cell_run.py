"""One cell from start to end: train the decoder, keep it, measure it at all lengths."""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch.encodings.replacement.entry_point import encode
from rope_patch.entry_points import patch
from rope_patch.lab.settings import LOG_N, PLAIN, SCALE, TEXT, Cell, LabSettings, encoding_options
from rope_patch.lab.tasks import RecallTask, Task, TextTask
from rope_patch.utils.atomic_files import atomic_write

_TIMED_STEPS = 3  # of a plan
_READ_COST = 0.4  # cost of a token that is read, where one that is trained on costs 1


def make_task(cell: Cell, settings: LabSettings) -> Task:
    """Return a cell's task.

    Raises:
        ValueError: The held-out texts are too short.
    """
    if cell.task == TEXT:
        return TextTask(settings.length, settings.tests[-1], settings.excerpts)
    return RecallTask(settings.length, settings.recall_steps, settings.sequences)


def cell_cost(cell: Cell, settings: LabSettings) -> int:
    """Return a cell's work in trained tokens, for the progress bar."""
    task = make_task(cell, settings)
    trained = sum(task.tokens(step) for step in range(settings.steps(cell.task)))
    read = sum(task.test_tokens(v.length) for v in variants(cell.encoding, settings))
    return trained + int(_READ_COST * read)


def step_rate(cell: Cell, settings: LabSettings) -> float:
    """Return how many tokens a second a cell trains on, on one thread, by a few of its steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        task = make_task(cell, settings)
        model = build_model(cell.encoding, task.vocabulary_size, settings.length, cell.seed)
        trainer = Trainer(model, task, settings.steps(cell.task), cell.seed, identity=None)
        return trainer.rate(_TIMED_STEPS)
    finally:
        torch.set_num_threads(threads)


def run_cell(
    cell: Cell, settings: LabSettings, checkpoint: Path, report: Callable[[int], object]
) -> dict[str, Any]:
    """Train and measure a cell on one thread, and return its results.

    Args:
        cell: The cell.
        settings: The run's.
        checkpoint: Where a cell in progress keeps its training; there may be one to go on from.
        report: Called with the work done, in trained tokens.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: the same numbers on every run
    try:
        start = time.process_time()
        task = make_task(cell, settings)
        model = build_model(cell.encoding, task.vocabulary_size, settings.length, cell.seed)
        identity = settings.identity(cell)
        trainer = Trainer(model, task, settings.steps(cell.task), cell.seed, identity)
        trainer.train(checkpoint, report)
        trained = time.process_time()
        scores = measure(
            model, cell.encoding, task, settings, lambda n: report(int(_READ_COST * n))
        )
        return {
            "cell": identity,
            "parameters": sum(p.numel() for p in model.parameters()),
            "encoding": _describe(model),
            "training_loss": trainer.losses,
            "bands": task.edges if isinstance(task, TextTask) else [],
            "scores": scores,
            "cpu_seconds": {
                "training": round(trained - start, 1),
                "measuring": round(time.process_time() - trained, 1),
            },
        }
    finally:
        torch.set_num_threads(threads)


def _describe(model: Any) -> str:
    """Return what the encoding does, with the scale that training found."""
    return model.model.position_encoding.describe()


WIDTH, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 4, 2, 192
# With the usual 0.02, recall takes three times as many steps.
SPREAD = 0.06


def build_model(encoding: str, vocabulary: int, length: int, seed: int) -> LlamaForCausalLM:
    """Return an untrained decoder; those of one seed begin with the same shared weights.

    Args:
        encoding: A name of `rope_patch.list_encodings()`.
        vocabulary: Number of token ids.
        length: Trained length, in tokens.
        seed: Of the weights.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=SPREAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        encode(model, encoding, **encoding_options(encoding, length))
    return model


LEARNING_RATE = 3e-3
_WARMUP, _DECAY = 0.05, 0.3  # shares of the steps in which the rate rises from and falls to zero
CHECKPOINT_STEPS = 50
_POINTS = 40  # points of the training loss that are recorded


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

    def rate(self, steps: int) -> float:
        """Return the tokens a second of some steps after the first, which is slow."""
        self.model.train()
        self._train_step()
        started, tokens = time.monotonic(), 0
        for _ in range(steps):
            tokens += self.task.tokens(self._step)
            self._train_step()
        return tokens / max(time.monotonic() - started, 1e-6)

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


# Temperatures of a decoder without positions; log-n is 1 up to the trained length.
_TEMPERATURES: dict[str, float | str] = {LOG_N: "log-n", SCALE: 1.2}
# What `rope_patch.patch` does to a trained model of an encoding.
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "none": (LOG_N, SCALE),
    "sinusoidal": ("ntk", "linear"),
    "learned": ("linear", "tile"),
    "t5": ("log-tail", "linear"),
    "alibi": ("ntk", "linear"),
    "rope": ("yarn", "linear"),
    "rnope": ("yarn",),
}


@dataclass(frozen=True)
class Variant:
    """A trained model at one test length.

    Attributes:
        method: A method of `rope_patch.patch`, or "plain".
        length: Tokens of the texts.
        target: The length that the method extends to; the trained one if plain.
    """

    method: str
    length: int
    target: int


def variants(encoding: str, settings: LabSettings) -> list[Variant]:
    """Return what is measured of an encoding.

    Each extension is measured at the lengths that it extends to, and the farthest one also within
    the trained length, which is its price. A learned table has no rows beyond that length.
    """
    trained, tests = settings.length, settings.tests
    plain = [Variant(PLAIN, n, trained) for n in tests if n == trained or encoding != "learned"]
    extended = []
    for method in EXTENSIONS.get(encoding, ()):
        if tests[-1] > trained and method != LOG_N:
            extended.append(Variant(method, trained, tests[-1]))
        extended += [Variant(method, n, n) for n in tests if n > trained]
    return plain + extended


def measure(
    model: Any,
    encoding: str,
    task: Task,
    settings: LabSettings,
    report: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Return the scores of all variants of a trained model, which is as before afterwards.

    Args:
        model: The trained model, in eval mode.
        encoding: Its encoding.
        task: Its task.
        settings: Lengths.
        report: Called with the tokens that each variant has read.
    """
    records = []
    for variant in variants(encoding, settings):
        with _extended(model, variant, settings.length):
            scores = task.measure(model, variant.length)
        records.append(
            {
                "method": variant.method,
                "length": variant.length,
                "target": variant.target,
                **scores,
            }
        )
        report(task.test_tokens(variant.length))
    return records


@contextlib.contextmanager
def _extended(model: Any, variant: Variant, trained: int) -> Iterator[None]:
    """Apply a variant's method within the block."""
    method = variant.method
    if method == PLAIN:
        yield
        return
    if method in _TEMPERATURES:
        temperature = _TEMPERATURES[method]
        handle = patch(model, "nope", temperature=temperature, trained_length=trained)
    else:
        handle = patch(model, method, length=variant.target, trained_length=trained)
    try:
        yield
    finally:
        handle.undo()
