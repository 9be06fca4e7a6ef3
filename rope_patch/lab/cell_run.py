"""One cell from start to end: train, keep the model, measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rope_patch.lab.measurement import measure, variants
from rope_patch.lab.model import build_model
from rope_patch.lab.recall_task import RecallTask
from rope_patch.lab.settings import TEXT, Cell, LabSettings
from rope_patch.lab.task import Task
from rope_patch.lab.text_task import TextTask
from rope_patch.lab.trainer import Trainer

_READ_COST = 0.4  # of a token that is read, where one that is trained on costs 1


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
