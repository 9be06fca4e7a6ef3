"""A stage of a recipe: its place, its folder, and the record of its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.runs.run_folder import RunFolder
from rope_patch.training import checkpoints

PREFIX = "stage-"
RECORD = "finished.json"  # written when the stage's model is whole
ADAPTER = "lora.safetensors"  # what LoRA trained, before it was merged
FORMAT = "rope_patch.stage/1"


@dataclass(frozen=True)
class Stage:
    """The place of a run within a recipe of several stages.

    Attributes:
        number: From 1.
        count: Number of stages.
        recipe_folder: The recipe's output folder, with a folder for each stage.
    """

    number: int
    count: int
    recipe_folder: Path

    @property
    def folder(self) -> Path:
        """Return the stage's own folder."""
        return self.recipe_folder / f"{PREFIX}{self.number}"

    @property
    def model(self) -> Path:
        """Return the folder of the stage's finished model."""
        return self.folder / checkpoints.MODEL

    @property
    def adapter(self) -> Path:
        """Return the file of what LoRA trained."""
        return self.folder / ADAPTER

    @property
    def previous(self) -> Stage | None:
        """Return the stage before, or None for the first one."""
        if self.number == 1:
            return None
        return Stage(self.number - 1, self.count, self.recipe_folder)

    @property
    def last_checkpoint(self) -> Path:
        """Return the checkpoint after the finished stage's last step."""
        record = self.read_record()
        assert record is not None, "only a finished stage is followed by another"
        return self.folder / f"{checkpoints.PREFIX}{record['steps']}"

    @property
    def has_begun(self) -> bool:
        """Return whether the stage's folder holds checkpoints or a model."""
        return (self.folder / RECORD).exists() or checkpoints.contains_run(self.folder)

    @contextlib.contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Name the stage in a ValueError that is raised within."""
        try:
            yield
        except ValueError as error:
            error.args = (f"stage {self.number} of {self.count}: {error}", *error.args[1:])
            raise

    def write_record(self, steps: int, facts: str) -> None:
        """Record that the stage is finished: its steps, its files, and its part of the card."""
        files = checkpoints.list_files(self.folder, [*self.model.rglob("*"), self.adapter])
        body = {"format": FORMAT, "steps": steps, "facts": facts, "files": files}
        RunFolder(self.folder).write(RECORD, body)

    def read_record(self) -> dict[str, Any] | None:
        """Return the record of the finished stage; None if it is missing or damaged."""
        try:
            return RunFolder(self.folder).read(RECORD, format=FORMAT)
        except (OSError, ValueError):
            return None

    def find_damage(self) -> str | None:
        """Return which file of the finished stage is not as it was written, or None."""
        record = self.read_record()
        if record is None:
            return f"it has no {RECORD}, so it was not finished"
        # A reader may complete the card.
        card = f"{checkpoints.MODEL}/README.md"
        files = {name: recorded for name, recorded in record["files"].items() if name != card}
        return checkpoints.find_file_damage(self.folder, files, RECORD)


def stage_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of stages in a recipe's output folder, by number."""
    names = {path.name.removeprefix(PREFIX): path for path in folder.glob(f"{PREFIX}*")}
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return {number: names[str(number)] for number in numbers if str(number) in names}


def require_no_stages(folder: Path) -> None:
    """Raise if a folder holds the run of a recipe with stages.

    Raises:
        ValueError: It does.
    """
    for number, path in stage_folders(folder).items():
        if Stage(number, number, folder).has_begun:
            raise ValueError(
                f"{folder} holds {path.name} of a recipe with stages, and this recipe has none: "
                "give another --output_dir"
            )
