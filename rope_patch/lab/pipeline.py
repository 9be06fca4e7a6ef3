"""A lab run: all cells that are not finished, then the report."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from queue import Empty
from typing import Any

from rope_patch.evaluation.decision_plan import RunPlan
from rope_patch.lab.cell_run import cell_cost, make_task, run_cell, step_rate
from rope_patch.lab.settings import RECALL, TASKS, TEXT, Cell, LabSettings
from rope_patch.lab.statements import LEAST_SEEDS
from rope_patch.runs.journal import check_lines
from rope_patch.runs.run_folder import RunFolder
from rope_patch.utils import atomic_files, checksums
from rope_patch.utils.provenance import hardware, now, versions
from rope_patch.utils.terminal import format_duration, progress_bar

logger = logging.getLogger("rope_patch")

_POLL = 0.5  # seconds between two looks at what the processes report


def run_lab(
    settings: LabSettings, folder: Path, processes: int = 1, command: str | None = None
) -> dict[str, Any]:
    """Train and measure all cells, continuing an earlier run in the folder, and return the results.

    Args:
        settings: What to train and measure.
        folder: For the journal of cells and their checkpoints; made if missing.
        processes: Cells that run at the same time, each on one thread.
        command: The command line, for the record.

    Raises:
        ValueError: Another run works in the folder, or the held-out texts are too short.
        OSError: The folder cannot be written to.
    """
    cells = settings.cells()
    for task in dict.fromkeys(cell.task for cell in cells):
        make_task(next(cell for cell in cells if cell.task == task), settings)
    atomic_files.require_writable_folder(folder, "the lab's results")
    journal = CellJournal(folder)
    with journal.run_folder.locked():
        done = journal.read(settings)
        left = [cell for cell in cells if cell not in done]
        if done:
            logger.info("%d of %d cells are finished already", len(done), len(cells))
        costs = {cell: cell_cost(cell, settings) for cell in left}
        bar = progress_bar(
            total=sum(costs.values()), unit="tok", unit_scale=True, desc="lab", smoothing=0.05
        )
        with bar:
            for cell, record in _results(left, settings, journal, processes, bar):
                journal.file.append(checksums.seal(record))
                journal.checkpoint(cell).unlink(missing_ok=True)
                done[cell] = record
    return {
        "run": {
            "command": command,
            "date": now(),
            "versions": versions(),
            "hardware": hardware(),
            "settings": {
                "encodings": list(settings.encodings),
                "tasks": [task for task in TASKS if task in settings.tasks],
                "length": settings.length,
                "tests": list(settings.tests),
                "steps": {task: settings.steps(task) for task in settings.tasks},
                "seeds": settings.seeds,
                "samples": {TEXT: settings.excerpts, RECALL: settings.sequences},
            },
        },
        "cells": [done[cell] for cell in cells],
    }


def plan_lab(settings: LabSettings, processes: int = 1) -> RunPlan:
    """Return what a lab run trains and measures, and how long that takes on this machine.

    A few steps of one cell are timed; nothing is written.

    Args:
        settings: What to train and measure.
        processes: Cells that run at the same time.
    """
    cells = settings.cells()
    costs = {cell: cell_cost(cell, settings) for cell in cells}
    rates = {
        task: step_rate(next(cell for cell in cells if cell.task == task), settings)
        for task in settings.tasks
    }
    at_once = min(processes, len(cells))
    trained = ", ".join(f"{settings.steps(task):,} steps of {task}" for task in settings.tasks)
    encodings = f"{len(settings.encodings)} encodings: {', '.join(settings.encodings)}"
    seeds = f"{settings.seeds} seed{'s' * (settings.seeds > 1)}"
    few = f"below {LEAST_SEEDS} seeds no statement is told from chance; these take about "
    seconds = sum(cost / rates[cell.task] for cell, cost in costs.items()) / at_once
    return RunPlan(
        measures=(encodings, f"{len(cells)} trainings: {trained}, {seeds}"),
        seconds=seconds,
        missing=few + format_duration(LEAST_SEEDS * seconds / settings.seeds)
        if settings.seeds < LEAST_SEEDS
        else "",
    )


class CellJournal:
    """The results of cells, a line each.

    A cell's line says what it depends on, so runs with other seeds, encodings or steps may share a
    folder; each reads its own lines.

    Args:
        folder: The run's folder.

    Attributes:
        run_folder: The folder.
        file: The file of results.
    """

    def __init__(self, folder: Path) -> None:
        self.run_folder = RunFolder(folder)
        self.file = self.run_folder.journal("cells.jsonl")

    def read(self, settings: LabSettings) -> dict[Cell, dict[str, Any]]:
        """Return the results of the settings' cells that are finished; damaged lines are not."""
        entries = check_lines(self.file.lines()).entries
        found: dict[Cell, dict[str, Any]] = {}
        for cell in settings.cells():
            identity = settings.identity(cell)
            for entry in entries:
                if entry.get("cell") == identity:
                    found[cell] = entry
        return found

    def checkpoint(self, cell: Cell) -> Path:
        """Return where a cell in progress keeps its training."""
        return self.run_folder.path / "checkpoints" / f"{cell.key}.pt"


def _results(
    cells: list[Cell], settings: LabSettings, journal: CellJournal, processes: int, bar: Any
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if processes == 1 or len(cells) < 2:
        for cell in cells:
            bar.set_postfix_str(cell.key, refresh=False)
            yield cell, run_cell(cell, settings, journal.checkpoint(cell), bar.update)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with context.Manager() as manager, contextlib.ExitStack() as stack:
        queue = manager.Queue()
        pool = ProcessPoolExecutor(processes, context, initializer=_end_on_interrupt)
        # On an error or Ctrl-C, cells that have not begun are dropped.
        stack.callback(pool.shutdown, cancel_futures=True)
        futures = {
            pool.submit(_run_reporting, cell, settings, journal.checkpoint(cell), queue): cell
            for cell in cells
        }
        while futures:
            with contextlib.suppress(Empty):
                bar.update(queue.get(timeout=_POLL))
                while True:
                    bar.update(queue.get_nowait())
            for future in [future for future in futures if future.done()]:
                cell = futures.pop(future)
                bar.set_postfix_str(cell.key, refresh=False)
                yield cell, future.result()


def _end_on_interrupt() -> None:
    """Have Ctrl-C end this process at once and silently: its cell has a checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_reporting(
    cell: Cell, settings: LabSettings, checkpoint: Path, queue: Any
) -> dict[str, Any]:
    """Run a cell in a process of its own, which reports its work now and then."""
    pending = 0

    def report(tokens: int) -> None:
        nonlocal pending
        pending += tokens
        if pending >= 50_000:
            queue.put(pending)
            pending = 0

    record = run_cell(cell, settings, checkpoint, report)
    queue.put(pending)
    return record
