"""Run the stages of a recipe one after another, each from the weights of the one before."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml
from accelerate.state import AcceleratorState, GradientState

from rope_patch.runs.run_folder import RunFolder
from rope_patch.training import checkpoints, identity
from rope_patch.training.data.arguments import check_data_arguments
from rope_patch.training.data.readers import find_source
from rope_patch.training.memory import plan
from rope_patch.training.optimizer import mixed_precision
from rope_patch.training.run import total_steps
from rope_patch.training.settings import RESOLVED, Settings
from rope_patch.training.stage import Stage, stage_folders
from rope_patch.utils import atomic_files
from rope_patch.utils.processes import Processes, free_memory

logger = logging.getLogger("rope_patch")


def run_stages(settings: Settings, run_stage: Callable[[Settings], Path | None]) -> Path | None:
    """Run a recipe's stages; a resumed one goes on in the stage that it was in.

    Args:
        settings: A recipe with stages.
        run_stage: Runs a stage's settings: `finetune`, or `loop` of
            `recipes/experiments/training_loop.py`.

    Returns:
        The finished model's folder, on the main process.

    Raises:
        ValueError: A stage does not fit its model or data, or the output folder holds another run;
            or the training diverged. Names the stage.
        OSError: A checkpoint could not be written.
    """
    folder = Path(str(settings.training.output_dir))
    atomic_files.require_writable_folder(folder, "the run")
    check_stages(settings)
    processes = Processes()
    processes.run_on_main(lambda: _require_resumable(settings))
    with RunFolder(folder).locked(processes):
        loop = run_stage.__name__ == "loop"
        first = processes.run_on_main(lambda: _first_unfinished(settings, loop))
        processes.run_on_main(lambda: _write_recipe(settings))
        for stage_settings in settings.stages[first:]:
            stage = _place(stage_settings)
            logger.info("stage %s of %s: %s", stage.number, stage.count, stage.folder)
            with stage.naming_errors():
                processes.run_on_main(lambda: _require_carried_state(stage_settings))  # noqa: B023
                _start_anew(stage_settings)
                run_stage(_resumed(stage_settings))
        last = _place(settings.stages[-1])
        processes.run_on_main(lambda: _publish(last))
    return folder / checkpoints.MODEL if processes.is_main else None


def check_stages(settings: Settings) -> None:
    """Check every stage before the first one is trained.

    Raises:
        ValueError: A stage's method or data does not fit, its target is shorter than that of the
            stage before, or its memory does not suffice; names the stage.
    """
    longest = None
    for stage_settings in settings.stages:
        stage = _place(stage_settings)
        with stage.naming_errors():
            target = plan.target_length(stage_settings)
            if longest is not None and target is not None and target < longest:
                raise ValueError(
                    f"its length is {target:,} tokens, after {longest:,} in the stage before: "
                    "expected lengths that rise or stay; rows may be shorter (train_length)"
                )
            longest = target if target is not None else longest
            extension = stage_settings.extension
            if extension.average_checkpoints and extension.lora_rank and stage.number < stage.count:
                raise ValueError(
                    "average_checkpoints merges LoRA's adapter, with which the next stage goes on: "
                    "expected it in the last stage alone, or lora_rank: 0"
                )
            plan.require_device(stage_settings)
            data = stage_settings.data
            check_data_arguments(data, plan.row_length(stage_settings))
            for source in [*data.data, *(data.short_data or [])]:
                if not source.startswith("hub:"):
                    find_source(source, data.text_column)


def _place(stage_settings: Settings) -> Stage:
    assert stage_settings.stage is not None
    return stage_settings.stage


def _resumed(stage_settings: Settings) -> Settings:
    """Return a stage's settings with the checkpoint that it resumes from, if any."""
    resume = stage_settings.extension.resume
    if resume not in ("auto", "no") and not _holds(stage_settings, resume):
        resume = "auto"
    return replace(stage_settings, extension=replace(stage_settings.extension, resume=resume))


def _holds(stage_settings: Settings, checkpoint: str) -> bool:
    return Path(checkpoint).resolve().parent == _place(stage_settings).folder.resolve()


def _require_resumable(settings: Settings) -> None:
    """Raise unless the output folder is free, or holds a run of so many stages to resume."""
    folder, resume = Path(str(settings.training.output_dir)), settings.extension.resume
    count = len(settings.stages)
    begun = [number for number in stage_folders(folder) if Stage(number, count, folder).has_begun]
    if not begun and checkpoints.contains_run(folder):
        raise ValueError(
            f"{folder} holds the run of a recipe without stages: give another --output_dir"
        )
    if begun and max(begun) > count:
        raise ValueError(
            f"{folder} holds stage {max(begun)} of a run, and the recipe has {count} stages: "
            "expected at least those that have begun, or another --output_dir"
        )
    if begun and resume == "no":
        raise ValueError(
            f"{folder} holds stage {max(begun)} of an earlier run: expected --resume auto to go on "
            "from it, or another --output_dir"
        )
    if resume in ("auto", "no"):
        return
    number = next((s.stage.number for s in settings.stages if s.stage and _holds(s, resume)), None)
    if number is None:
        raise ValueError(
            f"no checkpoint {resume} of a stage: expected auto, no, or a checkpoint in "
            f"{folder}/stage-N"
        )
    if number < max(begun, default=0):
        raise ValueError(
            f"cannot resume {resume}: stage {max(begun)} has begun from the finished model of an "
            "earlier stage; expected --resume auto, or another --output_dir"
        )


def _first_unfinished(settings: Settings, loop: bool) -> int:
    """Return the index of the stage to go on with; the number of stages if none is left."""
    for index, stage_settings in enumerate(settings.stages):
        stage = _place(stage_settings)
        following = settings.stages[index + 1] if index + 1 < stage.count else None
        if stage.read_record() is None or _holds(stage_settings, stage_settings.extension.resume):
            return index
        with stage.naming_errors():
            if not _require_same_steps(stage_settings, following, loop):
                return index
        needed = following is None or _place(following).read_record() is None
        if needed and (damage := stage.find_damage()) is not None:
            logger.warning(
                "stage %s of %s is finished once more: in %s, %s",
                stage.number,
                stage.count,
                stage.folder,
                damage,
            )
            return index
    return len(settings.stages)


def _require_same_steps(stage_settings: Settings, following: Settings | None, loop: bool) -> bool:
    """Return whether a finished stage needs no more steps; raise if it is of another recipe."""
    training, stage = stage_settings.training, _place(stage_settings)
    rows = _rows_per_step(stage_settings)
    steps = total_steps(stage_settings, rows * plan.row_length(stage_settings))
    done = identity.steps_of_run(stage.folder)
    if steps != done and following is not None and _place(following).has_begun:
        raise ValueError(
            f"its steps were {done:,}, got {steps:,}, and the next stage has begun from its "
            "finished model: set that back, or give another --output_dir"
        )
    identity.require_same_recipe(
        stage.folder,
        stage_settings,
        loop=loop,
        precision=mixed_precision(training),
        rows=rows,
        steps=done,
    )
    return steps == done


def _rows_per_step(stage_settings: Settings) -> int:
    """Return the rows of an optimizer step, before accelerate says how processes share them."""
    training = stage_settings.training
    sizes = getattr(training, "parallelism_config", None)
    parts = 1
    for name in ("cp", "sp", "tp"):
        variable = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
        parts *= int(variable) if sizes is None else getattr(sizes, f"{name}_size", 1)
    replicas = int(os.environ.get("WORLD_SIZE", "1")) // parts
    batch = training.per_device_train_batch_size
    return batch * training.gradient_accumulation_steps * replicas


def _require_carried_state(stage_settings: Settings) -> None:
    """Raise if a stage is to start with the optimizer's state of the one before, and has none."""
    stage = _place(stage_settings)
    if not stage_settings.extension.carry_optimizer or stage.previous is None:
        return
    if checkpoints.latest_complete(stage.folder) is not None:
        return
    if damage := checkpoints.find_damage(stage.previous.last_checkpoint):
        raise ValueError(
            f"carry_optimizer: {stage.previous.last_checkpoint} is to give the optimizer's state, "
            f"but {damage}; expected a checkpoint at the end of the stage before (save_strategy: "
            "steps), or carry_optimizer: false"
        )


def _write_recipe(settings: Settings) -> None:
    path = Path(str(settings.training.output_dir)) / RESOLVED
    text = yaml.safe_dump(settings.resolved(), sort_keys=False, allow_unicode=True)
    atomic_files.atomic_write(path, text)


def _start_anew(stage_settings: Settings) -> None:
    """Free the memory of the stage before, and set accelerate up as in a new process."""
    free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # transformers' arguments set up the devices once, and keep that as a cached property.
    vars(stage_settings.training).pop("_setup_devices", None)
    _ = stage_settings.training.device


def _publish(stage: Stage) -> None:
    """Put the last stage's model where a recipe without stages has its model."""
    target = stage.recipe_folder / checkpoints.MODEL
    for leftover in stage.recipe_folder.glob(f".{checkpoints.MODEL}-*"):  # left by a killed run
        shutil.rmtree(leftover, ignore_errors=True)
    with checkpoints.explain_write_errors(stage.recipe_folder, "the finished model"):
        with tempfile.TemporaryDirectory(
            prefix=f".{checkpoints.MODEL}-", dir=stage.recipe_folder
        ) as temporary:
            copy = Path(temporary) / checkpoints.MODEL
            # Linked where the file system allows, so that the files take their space once.
            shutil.copytree(stage.model, copy, copy_function=_link)
            if target.exists():
                target.rename(Path(temporary) / "old")
            copy.rename(target)
        atomic_files.sync(stage.recipe_folder)
    logger.info("the model of all stages is in %s", target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
