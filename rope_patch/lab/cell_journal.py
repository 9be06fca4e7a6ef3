"""The journal of finished cells, from which a lab run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rope_patch.lab.settings import Cell, LabSettings
from rope_patch.utils.checksums import seal
from rope_patch.utils.journal import JournalFile, check_lines

NAME = "cells.jsonl"
CHECKPOINTS = "checkpoints"


class CellJournal:
    """The results of cells, a line each.

    A cell's line says what it depends on, so runs with other seeds, encodings or steps may share a
    folder; each reads its own lines.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = JournalFile(folder / NAME)
        self._folder = folder

    def read(self, settings: LabSettings) -> dict[Cell, dict[str, Any]]:
        """Return the results of the settings' cells that are finished; damaged lines are not."""
        entries = check_lines(self._file.lines()).entries
        found: dict[Cell, dict[str, Any]] = {}
        for cell in settings.cells():
            identity = settings.identity(cell)
            for entry in entries:
                if entry.get("cell") == identity:
                    found[cell] = entry
        return found

    def append(self, record: dict[str, Any]) -> None:
        """Write a cell's results to the disk.

        Raises:
            NotWritten: They could not be written.
        """
        self._file.append(seal(record))

    def checkpoint(self, cell: Cell) -> Path:
        """Return where a cell in progress keeps its training."""
        return self._folder / CHECKPOINTS / f"{cell.key}.pt"
