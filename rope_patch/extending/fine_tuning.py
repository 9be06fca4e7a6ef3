"""Fine-tuning within an extension: what fits into memory and time, and the run itself."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from rope_patch.extending.proof import Candidate
from rope_patch.extending.request import ExtendRequest
from rope_patch.methods import build
from rope_patch.tasks import texts
from rope_patch.training import checkpoints
from rope_patch.training.memory import plan
from rope_patch.training.model_setup import prepare_model
from rope_patch.training.monitor import TrainingStopped, read_log
from rope_patch.training.run import open_run_folder
from rope_patch.training.settings import Settings, parse_settings
from rope_patch.training.trainer import LongContextTrainer, finetune
from rope_patch.utils.errors import Refused, one_line
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

# The novels that a model which trains on the others is measured on.
MEASURED_NOVELS = ("emma", "pride_and_prejudice")
MIN_STEPS = 20  # optimizer steps; fewer teach nothing that one could tell
_MAX_STEPS = 400  # YaRN's, arXiv:2309.00071, section 4
_TIMED_STEPS = 3  # steps of the trial that is timed, the first of which is slow
# Share of the time for steps; loading, checkpoints and slow steps take the rest.
_TRAINING_SHARE = 0.85
_OWN_KEYS = (
    *("model", "length", "factor", "output_dir", "resume", "seed", "data", "tokens"),
    "trust_remote_code",
)
# In the order of preference: the first that fits into memory is taken.
_MODES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA of rank 8": {"lora_rank": 8},
    "LoRA of rank 8, activations in the CPU's memory": {
        "lora_rank": 8,
        "offload_activations": True,
    },
}


def require_recipe(request: ExtendRequest) -> None:
    """Raise if a recipe's keys are unknown, or belong to options of `extend`.

    Raises:
        ValueError: Says which key, and what to do.
    """
    for key in _OWN_KEYS:
        if key in request.recipe:
            raise Refused(f"recipe: {key} follows from the other options of extend: leave it out")
    if request.train:
        if request.start != "auto":
            raise Refused(f"start {request.start} cannot be trained: expected auto with train")
        _settings(request, Candidate("yarn"), 2, Path("unused"), max_steps=1)


def plan_training(
    request: ExtendRequest, candidate: Candidate, length: int, folder: Path, seconds: float
) -> dict[str, Any]:
    """Return what fits: the trained weights, and the steps by the time of a few timed ones.

    Args:
        request: The extension.
        candidate: What to train.
        length: The target in tokens.
        folder: A folder for the timed steps, which is deleted.
        seconds: Time for training.

    Returns:
        `mode`, `changes` to the recipe, `step_seconds` and `steps`; or `left_out`, the reason why
        nothing is trained.
    """
    problem = ""
    for mode in _MODES:
        changes = _MODES[mode]
        settings = _settings(request, candidate, length, folder, max_steps=_TIMED_STEPS, **changes)
        try:
            plan.require_device(settings)
        except ValueError as error:
            problem = problem or one_line(str(error), max_length=None)
            continue
        break
    else:
        return {"left_out": f"training: neither all weights nor LoRA fit into memory: {problem}"}
    if problem:
        logger.info("all weights do not fit into memory, training %s", mode)
    step_seconds = _time_steps(settings, folder)
    fitting = int(seconds * _TRAINING_SHARE / step_seconds)
    most = int(request.recipe.get("max_steps", _MAX_STEPS))
    least = min(MIN_STEPS, most)
    if fitting < least:
        return {
            "left_out": f"training: a step of {mode} takes {format_duration(step_seconds)} "
            f"({step_seconds:.3g} s), so {fitting} steps fit into the {format_duration(seconds)} "
            f"that the budget leaves for it, and {least} are the fewest that are worth it"
        }
    steps = min(most, fitting)
    logger.info(
        "%.3g s for a step of %s: %s steps, about %s",
        step_seconds,
        mode,
        f"{steps:,}",
        format_duration(steps * step_seconds),
    )
    return {"mode": mode, "changes": changes, "step_seconds": step_seconds, "steps": steps}


def train(
    request: ExtendRequest,
    candidate: Candidate,
    length: int,
    folder: Path,
    training_plan: dict[str, Any],
) -> dict[str, Any]:
    """Train by a plan, or continue; return what was trained, or `left_out` if it diverged.

    Args:
        request: The extension.
        candidate: What to train.
        length: The target in tokens.
        folder: The run's folder.
        training_plan: What `plan_training` returned.
    """
    steps = int(training_plan["steps"])
    changes = {"max_steps": steps, "save_steps": max(1, steps // 10), **training_plan["changes"]}
    settings = _settings(request, candidate, length, folder, **changes)
    transformers_logging.disable_progress_bar()  # its short-lived bars would interrupt ours
    try:
        model = finetune(settings)
    except TrainingStopped as error:
        return {"left_out": f"training: {error}"}
    assert model is not None  # this is the main process
    log = read_log(folder)
    return {
        "mode": training_plan["mode"],
        "steps": steps,
        "tokens": log[-1]["tokens"],
        "losses": [log[0]["loss"], log[-1]["loss"]],
        "learning_rate": float(settings.training.learning_rate),
        "data": list(settings.data.data),
        "method": settings.extension.method,
        "label": str(build(settings.extension.method, **_factor(settings, length))),
        "folder": checkpoints.MODEL,
    }


def training_data(request: ExtendRequest) -> tuple[str, ...]:
    """Return the documents to train on."""
    novels = (name for name in texts.names() if name not in MEASURED_NOVELS)
    return request.data or tuple(f"novels:{name}" for name in novels)


def measured_texts(request: ExtendRequest) -> tuple[str, ...]:
    """Return the texts to measure on; empty for all novels of the package."""
    if request.texts or not request.train or request.data:
        return request.texts
    return MEASURED_NOVELS


def _time_steps(settings: Settings, folder: Path) -> float:
    """Return the seconds of a step after the first, and leave nothing behind."""
    shutil.rmtree(folder, ignore_errors=True)  # a killed run left it
    try:
        with open_run_folder(settings):
            trainer = LongContextTrainer(settings, prepare_model(settings), None)
            with contextlib.closing(trainer.run.progress):
                trainer.train()
            tokens, log = trainer.run.tokens_per_step, read_log(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return max(tokens / line["tokens_per_second"] for line in log[1:])


def _settings(
    request: ExtendRequest, candidate: Candidate, length: int, folder: Path, **changes: Any
) -> Settings:
    """Return a recipe; the request's keys replace the defaults, and `changes` replace both."""
    keys: dict[str, Any] = {
        "model": request.model,
        "method": candidate.method,
        "length": length,
        "data": list(training_data(request)),
        "packing": "single",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "learning_rate": 2e-5,  # YaRN's, section 4
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,  # share of the steps
        "weight_decay": 0.0,
        "bf16": torch.cuda.is_available(),
        "report_to": "none",
        "seed": request.seed,
        "resume": "auto",
        "output_dir": folder,
    }
    if candidate.options and "method" not in request.recipe:
        keys["options"] = json.dumps(candidate.options)
    if request.trust_remote_code:
        keys["trust_remote_code"] = True
    if request.anyway:
        keys["anyway"] = True
    if request.trained_length is not None:
        keys["trained_length"] = request.trained_length
    keys |= {**request.recipe, **changes}
    words: list[str] = []
    for key, value in keys.items():
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={value}")
    return parse_settings(words)[0]


def _factor(settings: Settings, length: int) -> dict[str, Any]:
    """Return the factor and the options that a method is built with, for its name in tables."""
    trained = settings.extension.trained_length
    if trained is None:
        from rope_patch.evaluation.encoding_facts import model_lengths
        from rope_patch.pretrained import demo
        from rope_patch.pretrained.loading import read_config

        path = demo.resolve_model_path(settings.extension.model)
        _, trained = model_lengths(path, read_config(path), None, "auto")
    return {"factor": length / trained, **settings.method_options}
