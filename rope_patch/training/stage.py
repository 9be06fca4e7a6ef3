"""Stages of a recipe: what each one's keys come to, its folder, and the record of its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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


STAGES = "stages"
ABOUT = (
    "A list of stages, in the file alone: each a mapping of keys that differ from the rest of the "
    "recipe, such as {length: 65536, max_steps: 1000}."
)
# Pairs of keys: a stage that sets one drops the other from the recipe.
_ALTERNATIVES = (("factor", "length"), ("max_steps", "tokens"))
_OF_THE_RECIPE = {
    "output_dir": "each stage gets a folder in the recipe's",
    "resume": "a run goes on in the stage that it was in",
    "plugin": "files with methods are loaded for all stages",
}
# The weights, the adapter and the devices of a stage are those of the stage before.
SHARED = (
    *("model", "trained_length", "dtype", "seed", "full_determinism", "bf16", "fp16", "tf32"),
    *("lora_rank", "lora_alpha", "lora_targets", "lora_trains", "use_liger_kernel"),
    *("use_cpu", "fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"),
    "ddp_backend",
)


def split_stages(recipe: dict[str, Any], path: Any) -> list[dict[str, Any]] | None:
    """Take the stages out of a recipe.

    Args:
        recipe: The file's keys and values; loses the key `stages`.
        path: The file, for errors.

    Returns:
        The keys of each stage alone; None if the recipe has no stages.

    Raises:
        ValueError: They are no list of mappings, or the list is empty.
    """
    if STAGES not in recipe:
        return None
    stages = recipe.pop(STAGES)
    if not isinstance(stages, list) or not stages:
        got = "an empty list" if stages == [] else f"{stages!r:.60}"
        raise ValueError(
            f"{STAGES} in {path} takes a list with the keys of each stage, got {got}: leave it out "
            "for a recipe of one stage"
        )
    for number, keys in enumerate(stages, start=1):
        if not isinstance(keys, dict):
            raise ValueError(
                f"stage {number} in {path}: expected keys and values, got {keys!r:.60}"
            )
        for key, reason in _OF_THE_RECIPE.items():
            if key in keys:
                raise ValueError(
                    f"stage {number} in {path}: {key} goes beside {STAGES}, not into it: {reason}"
                )
    return stages


def stage_recipe(recipe: dict[str, Any], stage: dict[str, Any]) -> dict[str, Any]:
    """Return the whole recipe of a stage: the stage's keys over those beside `stages`."""
    replaced = {
        other
        for pair in _ALTERNATIVES
        for key, other in (pair, pair[::-1])
        if key in stage and other not in stage
    }
    return {key: value for key, value in recipe.items() if key not in replaced} | stage


def join_stages(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a recipe with stages from the whole recipe of each stage."""
    first, *rest = stages
    common = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in rest)
    }
    own = [{k: v for k, v in keys.items() if k not in common} for keys in stages]
    return {**common, STAGES: own}


def require_shared(stages: Sequence[dict[str, Any]]) -> None:
    """Raise if stages differ in a key that they must share.

    Args:
        stages: The resolved values of each stage.

    Raises:
        ValueError: They differ; names the stage, the key and both values.
    """
    for number, values in enumerate(stages[1:], start=2):
        for key in SHARED:
            if values.get(key) != stages[0].get(key):
                raise ValueError(
                    f"stage {number}: {key} must be the same in all stages, it was "
                    f"{stages[0].get(key)!r} in stage 1, got {values.get(key)!r}: say it beside "
                    f"{STAGES}"
                )
