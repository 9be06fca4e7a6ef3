"""Fine-tune a model for a longer context, in a plain accelerate loop: the reference to read.

    python recipes/experiments/training_loop.py --config yarn_64k
    accelerate launch --config_file recipes/accelerate/fsdp2_cp8.yaml \
        recipes/experiments/training_loop.py --config yarn_64k

Gives the same losses for the same recipes as `rope-patch finetune`, which leaves the steps to
transformers' Trainer (rope_patch/training/trainer.py). Context parallelism is explicit here, in
`forward_backward`: rows are split over their tokens, and the keys of each part visit the queries of
the others. DeepSpeed needs the Trainer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import OPTIMIZER_NAME, DistributedType, load_fsdp_optimizer
from torch import nn
from torch.nn import functional
from transformers import TrainingArguments
from transformers.utils import logging

from rope_patch.cli import run as run_command
from rope_patch.training import checkpoints
from rope_patch.training.curriculum import run_stages
from rope_patch.training.finished_model import write_finished_model
from rope_patch.training.memory import plan
from rope_patch.training.model_setup import prepare_model
from rope_patch.training.monitor import needles_of
from rope_patch.training.optimizer import (
    decayed_names,
    keep_settings,
    make_scheduler,
    mixed_precision,
)
from rope_patch.training.run import TrainingRun, activation_offloading, open_run_folder
from rope_patch.training.settings import Settings, parse_settings
from rope_patch.utils import atomic_files

IGNORED = -100  # label without a loss
# Keys of TrainingArguments that only the Trainer implements.
TRAINER_ONLY_KEYS = (
    "optim",
    "optim_args",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "torch_compile",
)
Batch = dict[str, Any]


def loop(settings: Settings) -> Path | None:
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
        folder = run_stages(settings, loop)
        PartialState().destroy_process_group()
        return folder
    training = settings.training
    require_supported_by_loop(settings)
    atomic_files.require_writable_folder(str(settings.training.output_dir), "the run")
    plan.require_device(settings)
    with open_run_folder(settings) as resume:
        # Before accelerate, so that no process splits sequences yet.
        prepared = prepare_model(settings)
        accelerator = Accelerator(
            mixed_precision=mixed_precision(training),
            log_with=training.report_to or None,
            project_dir=training.output_dir,
            cpu=training.use_cpu,
        )
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError(
                "the plain loop does not speak DeepSpeed: use the Trainer, rope-patch finetune"
            )
        run = TrainingRun(settings, prepared, accelerator, resume, entry_point="loop")
        model, optimizer, scheduler = prepare_with_accelerate(run)
        if run.carried_checkpoint is not None:
            carry_optimizer(run, model, optimizer)
        accelerator.register_for_checkpointing(scheduler)
        if resume is not None:
            accelerator.load_state(str(resume))
        if training.use_liger_kernel:
            add_liger(prepared.model, training.liger_kernel_config)
        if training.report_to:
            accelerator.init_trackers(training.project, config=_tracker_config(settings.resolved()))
        with contextlib.closing(run.progress):
            train(run, model, optimizer, scheduler)
        model_folder = write_finished_model(run, model)
        if settings.stage is None:
            accelerator.end_training()
        else:  # the next stage needs the processes
            for tracker in accelerator.trackers:
                tracker.finish()
    return model_folder


def require_supported_by_loop(settings: Settings) -> None:
    """Raise ValueError if a recipe asks for what only the Trainer does."""
    values = settings.training.to_dict()
    defaults = {f.name: getattr(f.default, "value", f.default) for f in fields(TrainingArguments)}
    for key in TRAINER_ONLY_KEYS:
        if key in settings.explicit and values[key] != defaults[key]:
            raise ValueError(
                f"{key}: {values[key]} means nothing to the plain loop: leave it out, or use "
                "the Trainer, rope-patch finetune"
            )


def train(run: TrainingRun, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Take the remaining steps."""
    training, accelerator, needles = run.settings.training, run.accelerator, needles_of(run)
    if needles and run.steps_done == 0:
        _log_to_trackers(accelerator, needles.measure(run.prepared.model, 0), 0)
    batches: Iterator[dict[str, Any]] = iter(run.loader() if run.steps_done < run.steps else ())
    for step in range(run.steps_done + 1, run.steps + 1):
        micro_batches = [next(batches) for _ in range(training.gradient_accumulation_steps)]
        rows = [row for batch in micro_batches for row in batch.pop("rows", [])]
        loss = forward_backward(run, model, micro_batches)
        terms = run.prepared.objective.read(accelerator)
        norm = clip_grad_norm(accelerator, model, training.max_grad_norm)
        run.check_step(step, loss, terms, norm, rows)
        run.mark_consumed(rows)
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()
        logs = run.progress.record_step(
            step, loss=loss, **terms, grad_norm=norm, learning_rate=rate
        )
        if step % training.logging_steps == 0 or step == run.steps:
            _log_to_trackers(accelerator, logs, step)
        if needles and needles.is_due(step, run.steps):
            _log_to_trackers(accelerator, needles.measure(run.prepared.model, step), step)
            run.progress.pause()
        if training.save_strategy != "no" and (
            step % training.save_steps == 0 or step == run.steps
        ):
            with run.write_checkpoint(step) as temporary_folder:
                checkpoint = temporary_folder / f"{checkpoints.PREFIX}{step}"
                accelerator.save_state(str(checkpoint))
                run.write_data_state(checkpoint)
            run.progress.pause()


def prepare_with_accelerate(run: TrainingRun) -> tuple[Any, Any, Any]:
    """Return the model as accelerate wraps it, AdamW, and its learning-rate scheduler."""
    training, model, accelerator = run.settings.training, run.prepared.model, run.accelerator
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if training.gradient_checkpointing and not getattr(plugin, "activation_checkpointing", False):
        enable_checkpointing(model)
    optimizer: Any = torch.optim.AdamW(
        parameter_groups(
            model,
            training.weight_decay,
            decay_embeddings=run.settings.extension.decay_embeddings,
        ),
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    return model.train(), optimizer, make_scheduler(training, optimizer, run.steps)


def parameter_groups(
    model: nn.Module, weight_decay: float, *, decay_embeddings: bool
) -> list[dict[str, Any]]:
    """Return the trained parameters with and without weight decay, as an optimizer takes them."""
    decayed = set(decayed_names(model, decay_embeddings=decay_embeddings))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]


def enable_checkpointing(model: Any) -> None:
    """Turn activation checkpointing on: keep layer inputs, recompute the rest."""
    # transformers 5.23 renamed gradient_checkpointing_enable.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def add_liger(model: Any, config: dict[str, bool] | None) -> None:
    """Apply Liger's kernels to a model, as the Trainer does by itself."""
    try:
        from transformers.integrations.liger import apply_liger_kernel
    except ImportError as error:
        raise ValueError(
            "use_liger_kernel: this transformers has it in its Trainer only: use the Trainer, "
            "rope-patch finetune"
        ) from error
    apply_liger_kernel(model, config)


def carry_optimizer(run: TrainingRun, model: Any, optimizer: Any) -> None:
    """Load the optimizer's state of the stage before."""
    folder, plugin = run.carried_checkpoint, getattr(run.accelerator.state, "fsdp_plugin", None)

    def load_state() -> None:
        if plugin is not None:
            load_fsdp_optimizer(plugin, run.accelerator, optimizer, model, str(folder))
        else:
            file = f"{folder}/{OPTIMIZER_NAME}.bin"
            optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    keep_settings(optimizer, load_state)


def forward_backward(run: TrainingRun, model: Any, batches: Sequence[Batch]) -> float:
    """Compute the gradients of one optimizer step.

    Args:
        run: The run.
        model: The model as accelerate wrapped it.
        batches: This process's micro-batches, `[B, S]` each.

    Returns:
        The mean loss over all targets of the step, on all processes.
    """
    accelerator = run.accelerator
    batches = [_shift_labels({k: v.to(accelerator.device) for k, v in b.items()}) for b in batches]
    targets = sum((batch["shift_labels"] != IGNORED).sum() for batch in batches)
    # Processes that share a row each count its targets.
    count = accelerator.reduce(targets, reduction="sum") / run.context_parallel
    losses = []
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        with (
            contextlib.nullcontext() if last else accelerator.no_sync(model),
            context_parallel_batch(run, batch),
            run.teacher_forward(batch),
            activation_offloading(run.settings),
        ):
            part = model(**batch, num_items_in_batch=count, use_cache=False).loss
            # accelerate averages gradients over processes, but the loss needs their sum.
            loss = part * accelerator.num_processes
            accelerator.backward(loss)
        losses.append(loss.detach())
    return accelerator.reduce(torch.stack(losses).sum(), reduction="mean").item()


@contextlib.contextmanager
def context_parallel_batch(run: TrainingRun, batch: Batch) -> Iterator[None]:
    """Reduce every row to this process's part, for context parallelism.

    A part is two spans, one from either end of the row, so that causal attention costs every
    process the same. Targets and positions are split like the tokens: `_shift_labels` has put each
    target at its token, and the position decides the rotation. A mask of ones keeps transformers
    from taking the gap between the spans for the border of two documents.
    """
    if run.context_parallel == 1:
        yield
        return
    buffers = [batch[name] for name in batch]
    with run.accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        yield


def clip_grad_norm(accelerator: Accelerator, model: Any, limit: float) -> float:
    """Clip the gradients over all processes; return their norm before clipping."""
    norm = accelerator.clip_grad_norm_(model.parameters(), limit if limit > 0 else float("inf"))
    return float(norm)


def _shift_labels(batch: Batch) -> Batch:
    """Add labels shifted to each token's place, which transformers would do after the split."""
    shifted = functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    return batch | {"shift_labels": shifted.contiguous()}


def _log_to_trackers(accelerator: Accelerator, numbers: dict[str, float], step: int) -> None:
    accelerator.log({key: value for key, value in numbers.items() if key != "step"}, step=step)


def _tracker_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as the numbers and strings that every tracker accepts."""
    return {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    logging.disable_progress_bar()  # transformers' short-lived bars would interrupt ours
    settings, _ = parse_settings(sys.argv[1:] if arguments is None else arguments)
    loop(settings)


if __name__ == "__main__":
    run_command(main)
