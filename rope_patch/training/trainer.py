"""Fine-tune a model for a longer context, on transformers' Trainer.

    rope-patch finetune --config yarn_64k
    rope-patch recipes fsdp2 > fsdp2.yaml
    accelerate launch --config_file fsdp2.yaml -m rope_patch.recipes.finetune \
        --config yarn_64k --learning_rate 1.0e-5

Data parallelism, FSDP2, context parallelism and DeepSpeed come from accelerate's configs.
`recipes/experiments/training_loop.py` does the same with every step written out, and gives the same
losses.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import logging

from rope_patch.training import checkpoints
from rope_patch.training.curriculum import run_stages
from rope_patch.training.finished_model import write_finished_model
from rope_patch.training.memory import plan
from rope_patch.training.model_setup import PreparedModel, prepare_model
from rope_patch.training.monitor import needles_of
from rope_patch.training.optimizer import decayed_names, keep_settings, require_undecayed_embeddings
from rope_patch.training.run import TrainingRun, activation_offloading, open_run_folder
from rope_patch.training.settings import Settings, parse_settings
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.transformers_api.training import require_overridable
from rope_patch.utils import atomic_files

# Methods of the Trainer that a run depends on, and that it must therefore call.
OVERRIDDEN = (
    *("get_train_dataloader", "get_decay_parameter_names", "create_optimizer", "get_batch_samples"),
    *("training_step", "compute_loss", "_get_output_dir", "_save_checkpoint", "log"),
    "_issue_warnings_after_load",
)
CALLED_BACK = ("on_train_begin", "on_pre_optimizer_step", "on_step_end")


class LongContextTrainer(Trainer):
    """transformers' Trainer on packed rows of long documents.

    Rows are streamed, and atomic checkpoints hold their state. A loss that is not finite stops the
    run before the step that would spoil the weights.

    Args:
        settings: The recipe.
        prepared: The recipe's model.
        resume: The checkpoint to resume from, if any.
    """

    def __init__(self, settings: Settings, prepared: PreparedModel, resume: Path | None) -> None:
        require_overridable(Trainer, type(self), *OVERRIDDEN)
        require_overridable(TrainerCallback, _TrainerHooks, *CALLED_BACK)
        training = settings.training
        training.ignore_data_skip = True  # rows resume from their own state
        training.logging_nan_inf_filter = False  # a loss that is not finite stops the run
        training.remove_unused_columns = False
        self.checkpoint_folder: str | None = None
        super().__init__(model=prepared.model, args=training)
        self.run = TrainingRun(settings, prepared, self.accelerator, resume, entry_point="finetune")
        training.max_steps = self.run.steps
        self.resume = resume
        self.step_rows: list[dict[str, Any]] = []
        self.micro_batch_losses: list[torch.Tensor] = []
        self.step_metrics: dict[str, float] = {}
        self.step_grad_norm: Any = None
        self._accelerate_clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self.clip_and_record_norm
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        self.add_callback(_TrainerHooks(self))

    def get_train_dataloader(self) -> DataLoader:
        """Return this process's rows; accelerate must not split them again."""
        return self.run.loader()

    def get_decay_parameter_names(self, model: Any, *_: Any) -> list[str]:
        """Return the names of the parameters with weight decay; see `decayed_names`."""
        decay_embeddings = self.run.settings.extension.decay_embeddings
        return decayed_names(model, decay_embeddings=decay_embeddings)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the recipe's optimizer."""
        optimizer = super().create_optimizer() if model is None else super().create_optimizer(model)
        if not self.run.settings.extension.decay_embeddings:
            trained: Any = self.model if model is None else model
            require_undecayed_embeddings(trained, optimizer)
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Move the rows' origins from a step's batches to `step_rows`."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        self.step_rows = [row for batch in batches for row in batch.pop("rows", [])]
        return batches, count

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a forward and backward pass, and record the loss."""
        with activation_offloading(self.run.settings):
            loss = super().training_step(*args, **kwargs)
        self.micro_batch_losses.append(loss)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss after the original model read what is distilled, if anything is."""
        with self.run.teacher_forward(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def clip_and_record_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients as accelerate does, and record their norm."""
        self.step_grad_norm = self._accelerate_clip(*args, **kwargs)
        return self.step_grad_norm

    def inspect_step(self) -> None:
        """Check a step's loss and gradients before they are applied."""
        if self.step_grad_norm is None:  # the recipe does not clip
            self.clip_and_record_norm(self.model_wrapped.parameters(), float("inf"))
        norm = (
            0.0 if self.step_grad_norm is None else float(self.step_grad_norm)
        )  # DeepSpeed may not return it
        loss = self.accelerator.reduce(
            torch.stack(self.micro_batch_losses).sum(), reduction="mean"
        ).item()
        self.micro_batch_losses, self.step_grad_norm = [], None
        rate = self._get_learning_rate()
        # Losses are divided by the targets of all processes, or by those of each.
        reduction = "sum" if self.args.average_tokens_across_devices else "mean"
        terms = self.run.prepared.objective.read(self.accelerator, reduction)
        self.step_metrics = {"loss": loss, **terms, "grad_norm": norm, "learning_rate": rate}
        self.run.check_step(self.state.global_step + 1, loss, terms, norm, self.step_rows)
        self.run.mark_consumed(self.step_rows)

    def carry_optimizer(self) -> None:
        """Load the optimizer's state of the stage before, if the recipe says so."""
        carried = self.run.carried_checkpoint
        if carried is None:
            return
        if self.is_deepspeed_enabled:
            raise ValueError(
                "carry_optimizer: DeepSpeed loads its optimizer's state with the weights: expected "
                "carry_optimizer: false, or FSDP"
            )
        assert self.lr_scheduler is not None
        schedule = self.lr_scheduler.state_dict()
        keep_settings(self.optimizer, lambda: self._load_optimizer_and_scheduler(str(carried)))
        self.lr_scheduler.load_state_dict(schedule)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        config = getattr(self.model, "config", None)
        if getattr(config, "tie_word_embeddings", False):  # files have tied weights once
            tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
            missing = [key for key in load_result.missing_keys if key not in tied]
            load_result = load_result._replace(missing_keys=missing)
        super()._issue_warnings_after_load(load_result)

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoint_folder or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        with self.run.write_checkpoint(step) as temporary_folder:
            self.checkpoint_folder = str(temporary_folder)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.checkpoint_folder = None
            self.run.write_data_state(temporary_folder / f"{checkpoints.PREFIX}{step}")
        self.run.progress.pause()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, their speed and memory to the trackers' numbers."""
        if "loss" in logs:
            logs |= {k: v for k, v in self.step_metrics.items() if k not in logs}
        super().log(logs, start_time)


class _TrainerHooks(TrainerCallback):
    """Callbacks between the Trainer's steps: checks, progress, needles."""

    def __init__(self, trainer: LongContextTrainer) -> None:
        self.trainer = trainer
        self.needles = needles_of(trainer.run)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.resume is not None:  # the Trainer does this only if it skips data itself
            self.trainer._load_rng_state(str(self.trainer.resume))
            return
        self.trainer.carry_optimizer()
        if self.needles:
            self._measure_needles(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.inspect_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer.step_metrics = trainer.run.progress.record_step(
            state.global_step, **trainer.step_metrics
        )
        if self.needles and self.needles.is_due(state.global_step, trainer.run.steps):
            self._measure_needles(state.global_step)
        if state.global_step == trainer.run.steps:
            control.should_save = args.save_strategy != "no"

    def _measure_needles(self, step: int) -> None:
        assert self.needles is not None
        scores = self.needles.measure(self.trainer.run.prepared.model, step)
        control = self.trainer.control
        due = control.should_log  # any logging resets the step's flag
        if scores:
            self.trainer.log(scores)
        control.should_log = due
        self.trainer.run.progress.pause()


@takes_remote_code
def finetune(settings: Settings) -> Path | None:
    """Run a recipe.

    Args:
        settings: The recipe.

    Returns:
        The finished model's folder, on the main process.

    Raises:
        ValueError: The recipe, its data or its model do not fit; the output folder holds another
            or an active run; or the training diverged.
        OSError: A checkpoint could not be written.
    """
    if settings.stages:
        return run_stages(settings, finetune)
    atomic_files.require_writable_folder(str(settings.training.output_dir), "the run")
    plan.require_device(settings)
    with open_run_folder(settings) as resume:
        prepared = prepare_model(settings)
        trainer = LongContextTrainer(settings, prepared, resume)
        if resume is not None and trainer.run.steps_done >= trainer.run.steps:
            trainer._load_from_checkpoint(str(resume))
        else:
            with contextlib.closing(trainer.run.progress):
                trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return write_finished_model(trainer.run, trainer.model_wrapped)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; then train or plan."""
    logging.disable_progress_bar()  # transformers' short-lived bars would interrupt ours
    settings, flags = parse_settings(sys.argv[1:] if arguments is None else arguments)
    if flags.plan:
        print(plan.format_plan(settings, as_json=flags.json))
    else:
        finetune(settings)
