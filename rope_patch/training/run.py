"""Hold the state of a training run: its folder, its rows, its progress and its checkpoints.

`rope_patch.training.trainer` takes the steps, or its twin with every step written out,
`recipes/experiments/training_loop.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from rope_patch.methods.position_map import PositionMap
from rope_patch.runs.run_folder import RunFolder
from rope_patch.training import checkpoints, identity
from rope_patch.training.data.arguments import require_no_document_masks
from rope_patch.training.data.packing import PackedRows, RowShare, collate, summarize
from rope_patch.training.model_setup import PreparedModel
from rope_patch.training.monitor import DivergenceGuard, TrainingProgress, drop_scores
from rope_patch.training.objective.distillation import mark_distilled
from rope_patch.training.optimizer import mixed_precision
from rope_patch.training.settings import RESOLVED, Settings
from rope_patch.training.stage import require_no_stages
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused
from rope_patch.utils.processes import Processes

logger = logging.getLogger("rope_patch")


class TrainingRun:
    """A run of a recipe: its folder, its rows, its progress.

    Args:
        settings: The recipe.
        prepared: The recipe's model.
        accelerator: accelerate's Accelerator, whose processes share the work.
        resume: The checkpoint to resume from, if any.
        entry_point: "finetune", or "loop" for `recipes/experiments/training_loop.py`; their
            checkpoints differ.
    """

    def __init__(
        self,
        settings: Settings,
        prepared: PreparedModel,
        accelerator: Any,
        resume: Path | None,
        *,
        entry_point: str,
    ) -> None:
        self.settings = settings
        self.entry_point = entry_point
        self.prepared = prepared
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        keep_loss_exact(accelerator)
        self.folder = Path(str(settings.training.output_dir))
        training = settings.training
        sharing = process_layout(accelerator)
        if (distillation := prepared.objective.distillation) is not None:
            _require_distillation(accelerator)
            distillation.to_device(accelerator, accelerator.num_processes // sharing.reader_count)
        self.context_parallel = sharing.context_parallel
        self._require_whole_sequences()
        batch = training.per_device_train_batch_size
        self.rows_per_step = batch * training.gradient_accumulation_steps * sharing.replicas
        self.tokens_per_step = self.rows_per_step * prepared.row_length
        self.steps = total_steps(settings, self.tokens_per_step)
        self.rows = PackedRows(
            settings.data,
            prepared.tokenizer,
            row_length=prepared.row_length,
            trained_length=prepared.trained_length,
            target_length=prepared.target_length,
            follows_length=prepared.follows_length,
            seed=settings.row_seed,
            share=RowShare(batch, sharing.reader_index, sharing.reader_count),
        )
        limit = settings.extension.max_loss_rise
        self.guard = DivergenceGuard(limit, self.folder, on_stop=lambda: self.progress.close())
        self.steps_done = 0
        self.averaged_steps: list[int] = []
        self._rotation: dict[str, Any] = {}
        processes = Processes()
        processes.run_on_main(lambda: self._require_same_run(resume))
        self._data_state: dict[str, Any] = {}
        self.document_counts: dict[str, dict[str, int]] = {}
        if resume is not None:
            self.steps_done = checkpoints.step_of(resume)
            saved = json.loads((resume / checkpoints.DATA_STATE).read_text())
            self.rows.resume(saved["state"], self.steps_done * self.rows_per_step)
            self._data_state = saved["state"]
            self.guard.recent_losses.extend(saved.get("losses", []))
        if self.is_main:
            text = yaml.safe_dump(settings.resolved(), sort_keys=False, allow_unicode=True)
            with checkpoints.explain_write_errors(self.folder, RESOLVED):
                atomic_files.atomic_write(
                    self.folder / RESOLVED, f"# {_command_line()}\n{self._stage_comment()}{text}"
                )
                drop_scores(self.folder, self.steps_done)
        self.progress = TrainingProgress(
            self.folder, self.steps, self.steps_done, self.tokens_per_step, self.is_main
        )

    def loader(self) -> DataLoader:
        """Return an endless DataLoader of this process's rows."""
        training = self.settings.training
        has_gaps = self.context_parallel > 1 or self.settings.data.positions == "skip"

        def make_batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
            batch = collate(rows, has_gaps=has_gaps)
            return batch if self.prepared.objective.distillation is None else mark_distilled(batch)

        return DataLoader(
            self.rows,
            batch_size=training.per_device_train_batch_size,
            collate_fn=make_batch,
            num_workers=training.dataloader_num_workers,
            pin_memory=training.dataloader_pin_memory and self.accelerator.device.type == "cuda",
            # The iterator draws a seed; its own generator keeps a resumed run's numbers in step.
            generator=torch.Generator(),
        )

    def teacher_forward(self, batch: dict[str, Any]) -> Any:
        """Return the context of a micro-batch's loss; see `Distillation.teacher_forward`.

        Args:
            batch: The micro-batch; only the model's inputs are left in it.
        """
        distillation = self.prepared.objective.distillation
        if distillation is None:
            return contextlib.nullcontext()
        return distillation.teacher_forward(batch)

    def check_step(
        self,
        step: int,
        loss: float,
        terms: dict[str, float],
        norm: float,
        rows: list[dict[str, Any]],
    ) -> None:
        """Check a step before it is taken; see `DivergenceGuard.check`.

        Args:
            step: The step's number, from 1.
            loss: The loss over all processes.
            terms: The loss's terms.
            norm: The gradient norm over all processes.
            rows: The `row` of each row that this process computed the loss from.
        """
        self.guard.require_finite(step, loss, norm, rows)
        if self.prepared.objective.distillation is not None:
            # A step's share of distilled rows moves its loss: other rows' losses are comparable.
            if "language_loss" not in terms:
                return
            loss = terms["language_loss"]
        self.guard.check(step, loss, norm, rows)

    def mark_consumed(self, rows: list[dict[str, Any]]) -> None:
        """Remember the state of the data after a step's rows."""
        if rows:
            self._data_state, self.document_counts = rows[-1]["state"], rows[-1]["counts"]

    @contextlib.contextmanager
    def write_checkpoint(self, step: int) -> Iterator[Path]:
        """Write a checkpoint atomically; see `checkpoints.atomic_checkpoint`."""
        limit = self.settings.training.save_total_limit
        limit = max(limit, self.settings.extension.average_checkpoints) if limit else None
        self.prepared.mark_trained()
        try:
            with checkpoints.atomic_checkpoint(
                self.folder,
                step,
                is_main=self.is_main,
                wait=self.accelerator.wait_for_everyone,
                keep=limit,
            ) as temporary_folder:
                yield temporary_folder
        except BaseException:
            self.progress.close()  # so that the error starts on a new line
            raise

    def write_data_state(self, checkpoint: Path) -> None:
        """Write the data's state and the recent losses into a checkpoint."""
        if self.is_main:
            losses = list(self.guard.recent_losses)
            state = {"state": self._data_state, "losses": losses, "rotation": self._rotation}
            atomic_files.write_json(checkpoint / checkpoints.DATA_STATE, state)

    def _require_enough_checkpoints(self, resume: Path | None) -> None:
        """Raise if the run will not have as many checkpoints as it is to average."""
        training, count = self.settings.training, self.settings.extension.average_checkpoints
        done = 0 if resume is None else checkpoints.step_of(resume)
        every = (
            training.save_steps if training.save_steps >= 1 else self.steps * training.save_steps
        )
        every = math.ceil(every)
        existing = {step for step in checkpoints.steps_of_checkpoints(self.folder) if step <= done}
        coming = {*range(every, self.steps + 1, every), self.steps}
        number = len(existing | {step for step in coming if step > done})
        if number < count:
            raise ValueError(
                f"average_checkpoints: {count} needs as many checkpoints, but the run has "
                f"{number} ({len(existing)} of them in {self.folder} already, save_steps: "
                f"{training.save_steps:g}, {self.steps:,} steps): expected smaller save_steps, or "
                f"average_checkpoints: {number if number > 1 else 0}"
            )

    @property
    def carried_checkpoint(self) -> Path | None:
        """Return the checkpoint whose optimizer state this run starts with, if any."""
        stage = self.settings.stage
        if not self.settings.extension.carry_optimizer or self.steps_done:
            return None
        return None if stage is None or stage.previous is None else stage.previous.last_checkpoint

    def _stage_comment(self) -> str:
        """Return what the keys of a stage's recipe do not say."""
        stage = self.settings.stage
        if stage is None:
            return ""
        start = (
            "" if stage.previous is None else f", begun with the weights of {stage.previous.folder}"
        )
        return f"# stage {stage.number} of {stage.count}{start}\n"

    def data_summaries(self) -> dict[str, str]:
        """Return what packing, filter and aggregation tasks did, by name."""
        return summarize(self.settings.data, self._data_state)

    def _require_same_run(self, resume: Path | None) -> None:
        """Raise if the folder holds another run; else write this run's identity."""
        training = self.settings.training
        new_identity = identity.identity_of(
            self.settings,
            self.prepared,
            loop=self.entry_point == "loop",
            precision=mixed_precision(training),
            rows=self.rows_per_step,
            steps=self.steps,
        )
        folders = [self.folder.resolve()] if checkpoints.contains_run(self.folder) else []
        if resume is not None:
            folders.append(resume.resolve().parent)
            if training.save_only_model:
                raise ValueError(
                    f"cannot resume {resume}: with save_only_model: true it lacks the state of "
                    "the optimizer; give another --output_dir"
                )
        for run_folder in dict.fromkeys(folders):
            steps_done = None if resume is None else checkpoints.step_of(resume)
            identity.require_same_identity(run_folder, new_identity, self.settings, steps_done)
        self._require_enough_checkpoints(resume)
        self._rotation = identity.rotation_of(new_identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        identity.write_identity(self.folder, new_identity)

    def _require_whole_sequences(self) -> None:
        """Raise if a method or data needs whole rows where processes hold parts of them."""
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        handle = self.prepared.handle
        shares_rows = self.context_parallel > 1 or getattr(parallelism, "sp_enabled", False)
        if handle is not None and isinstance(handle.method, PositionMap) and shares_rows:
            raise ValueError(
                f"{handle.method} compares each token with all before it, and where processes "
                "share rows each has a part of them: expected whole rows, as with FSDP, or a "
                "method that changes frequencies alone, such as yarn"
            )
        if self.prepared.follows_length and getattr(parallelism, "sp_enabled", False):
            assert handle is not None
            raise ValueError(
                f"{handle.method} rotates each row by its length, of which DeepSpeed's sequence "
                "parallelism shows a process only its part: expected context parallelism, or a "
                "method whose frequencies stay, such as yarn"
            )
        length, parts = self.prepared.row_length, 2 * self.context_parallel
        if self.context_parallel == 1:
            return
        require_no_document_masks(self.settings.data)
        if length % parts:
            raise ValueError(
                f"train_length must be divisible by {parts}, twice the {self.context_parallel} "
                f"processes of context parallelism, got {length:,}: expected for example "
                f"{math.ceil(length / parts) * parts:,}"
            )


def _require_distillation(accelerator: Any) -> None:
    """Raise if processes share the work in a way that the original model does not follow."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise Refused(
            "distillation_weight keeps the original model beside the trained one, which DeepSpeed "
            "does not place: expected one process, data parallelism or FSDP2, such as rope-patch "
            "recipes fsdp2"
        )


@contextlib.contextmanager
def open_run_folder(settings: Settings) -> Iterator[Path | None]:
    """Lock the output folder against other runs.

    Yields:
        The checkpoint to resume from, if any.

    Raises:
        ValueError: Another run is active in the folder, or the folder holds a run and `resume` is
            "no"; in every process.
        OSError: The folder cannot be locked; in every process.
    """
    folder, resume = Path(str(settings.training.output_dir)), settings.extension.resume

    def require_resumable() -> None:
        if resume == "no":
            checkpoints.require_no_run(folder)
        elif checkpoints.contains_run(folder):
            identity.require_identity(folder)

    processes = Processes()
    if settings.stage is None:
        processes.run_on_main(lambda: require_no_stages(folder))
    processes.run_on_main(require_resumable)  # before the lock creates its file there
    with RunFolder(folder).locked(processes):
        yield processes.run_on_main(lambda: checkpoints.resume_checkpoint(folder, resume))


def total_steps(settings: Settings, tokens_per_step: int) -> int:
    """Return the recipe's optimizer steps, computed from its tokens if given."""
    if settings.extension.tokens is not None:
        return math.ceil(settings.extension.tokens / tokens_per_step)
    return settings.training.max_steps


def activation_offloading(settings: Settings) -> Any:
    """Return a context that keeps saved activations in CPU memory, if the recipe says so."""
    if not settings.extension.offload_activations:
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _command_line() -> str:
    """Return the command line of this process, on one line."""
    program, *words = sys.argv
    module = ["python", "-m", "rope_patch.recipes.finetune"]
    name = module if Path(program).suffix == ".py" else ["rope-patch"]
    return " ".join(shlex.join([*name, *words]).split())


def keep_loss_exact(accelerator: Any) -> None:
    """Keep FSDP2 from rounding module outputs, such as the loss, to 16 bits.

    Args:
        accelerator: accelerate's Accelerator, before its `prepare`.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) is not None:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


class ProcessLayout(NamedTuple):
    """Distribution of the work over processes.

    Attributes:
        context_parallel: Processes that hold parts of the same rows.
        reader_index: Index of this process among those that read different rows.
        reader_count: Number of processes that read different rows.
        replicas: Rows in training at once, per row in a batch.
    """

    context_parallel: int
    reader_index: int
    reader_count: int
    replicas: int


def process_layout(accelerator: Any) -> ProcessLayout:
    """Return how accelerate's processes share the work.

    Under DeepSpeed's sequence parallelism each process reads different rows, which are split over
    the processes one after the other.
    """
    sizes = getattr(accelerator, "parallelism_config", None)
    processes_per_row = 1 if sizes is None else sizes.cp_size * sizes.tp_size
    readers = accelerator.num_processes // processes_per_row
    return ProcessLayout(
        context_parallel=1 if sizes is None else sizes.cp_size,
        reader_index=accelerator.process_index // processes_per_row,
        reader_count=readers,
        replicas=readers // getattr(sizes, "sp_size", 1),
    )
