"""What both recipes do around their steps: where the run stands, its data, its end."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from rope_patch.pretrained.saving import save
from rope_patch.training import checkpoints, identity
from rope_patch.training.model_card import write_card
from rope_patch.training.model_setup import PreparedModel, prepare
from rope_patch.training.monitor import DivergenceGuard, TrainingProgress
from rope_patch.training.needle_callback import drop_scores
from rope_patch.training.packing import PackedRows, collate, require_no_document_masks
from rope_patch.training.settings import RESOLVED, Settings
from rope_patch.utils import atomic_files
from rope_patch.utils.folder_lock import lock_folder
from rope_patch.utils.processes import Processes

logger = logging.getLogger("rope_patch")

DATA_STATE = "rows.json"
_LOGGED_COUNTS = ("documents", "tokens")


class TrainingRun:
    """A run of a recipe: its place on disk, its rows, its watch.

    Args:
        settings: The recipe.
        prepared: Its model.
        accelerator: accelerate's, whose processes share the work.
        resume: The checkpoint to go on from, if any.
        entry_point: Who takes the steps, finetune or loop, which write checkpoints of their own.
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
            seed=training.data_seed or training.seed,
            batch=batch,
            rank=sharing.reader_index,
            world=sharing.reader_count,
        )
        limit = settings.extension.max_loss_rise
        self.guard = DivergenceGuard(limit, self.folder, on_stop=lambda: self.progress.close())
        self.steps_done = 0
        processes = Processes()
        processes.run_on_main(lambda: self._require_same_run(resume))
        self._data_state: dict[str, Any] = {}
        self._document_counts: dict[str, dict[str, int]] = {}
        if resume is not None:
            self.steps_done = checkpoints.step_of(resume)
            said = json.loads((resume / DATA_STATE).read_text())
            self.rows.resume(said["state"], self.steps_done * self.rows_per_step)
            self._data_state = said["state"]
            self.guard.recent_losses.extend(said.get("losses", []))
        if self.is_main:
            text = yaml.safe_dump(settings.resolved(), sort_keys=False, allow_unicode=True)
            with checkpoints.explain_write_errors(self.folder, RESOLVED):
                atomic_files.atomic_write(self.folder / RESOLVED, f"# {_command_line()}\n{text}")
                drop_scores(self.folder, self.steps_done)
        self.progress = TrainingProgress(
            self.folder, self.steps, self.steps_done, self.tokens_per_step, self.is_main
        )

    def loader(self) -> DataLoader:
        """Batches of this process's rows, without end."""
        training = self.settings.training
        return DataLoader(
            self.rows,
            batch_size=training.per_device_train_batch_size,
            collate_fn=lambda rows: collate(rows, context_parallel=self.context_parallel > 1),
            num_workers=training.dataloader_num_workers,
            pin_memory=training.dataloader_pin_memory and self.accelerator.device.type == "cuda",
            # Its iterator draws a seed, which a resumed run's random numbers must not be behind.
            generator=torch.Generator(),
        )

    def mark_consumed(self, rows: list[dict[str, Any]]) -> None:
        """Remembers where the data stood after a step's rows."""
        if rows:
            self._data_state, self._document_counts = rows[-1]["state"], rows[-1]["counts"]

    @contextlib.contextmanager
    def write_checkpoint(self, step: int) -> Iterator[Path]:
        """See `checkpoints.writing`; the data's state goes along with what is written."""
        limit = self.settings.training.save_total_limit
        try:
            with checkpoints.atomic_checkpoint(
                self.folder,
                step,
                is_main=self.is_main,
                wait=self.accelerator.wait_for_everyone,
                keep=limit,
            ) as aside:
                yield aside
        except BaseException:
            self.progress.close()  # what is said of it gets a line of its own
            raise

    def write_data_state(self, checkpoint: Path) -> None:
        """Puts the data's state and the last losses into a checkpoint that is being written."""
        if self.is_main:
            losses = list(self.guard.recent_losses)
            state = {"state": self._data_state, "losses": losses}
            atomic_files.write_json(checkpoint / DATA_STATE, state)

    def finish(self, model: Any) -> Path | None:
        """Writes the finished model: natively, with tokenizer and card.

        Args:
            model: The model as accelerate wrapped it.

        Returns:
            The model's folder, on the main process.
        """
        self.progress.close()
        weights = self.accelerator.get_state_dict(model) if _is_sharded(model) else None
        if not self.is_main:
            return None
        for source, read in self._document_counts.items():
            logger.info(
                "read of %s: documents %s, tokens %s",
                source,
                *(f"{read[k]:,}" for k in _LOGGED_COUNTS),
            )
        target = self.folder / checkpoints.MODEL
        if weights is not None:  # a model in one piece again
            # Others do not make one, so this one cannot try a loss together with them.
            untried = replace(self.settings.extension, loss="full")
            self.prepared = prepare(replace(self.settings, extension=untried))
            self.prepared.model.load_state_dict(weights)
        whole = self.prepared.finish()
        with checkpoints.explain_write_errors(self.folder, "the finished model"):
            if self.prepared.handle is None:
                with tempfile.TemporaryDirectory(
                    prefix=f".{checkpoints.MODEL}-", dir=self.folder
                ) as aside:
                    whole.save_pretrained(aside)
                    target.mkdir(exist_ok=True)
                    for written in Path(aside).iterdir():
                        written.replace(target / written.name)
            else:
                save(whole, target)
            self.prepared.tokenizer.save_pretrained(target)
            write_card(self, target)
        logger.info("the model is in %s", target)
        return target

    def _require_same_run(self, resume: Path | None) -> None:
        """Refuse to go on with another run, or write down which one this is."""
        training = self.settings.training
        now = identity.identity_of(
            self.settings,
            self.prepared,
            loop=self.entry_point == "loop",
            precision=mixed_precision(training),
            rows=self.rows_per_step,
            steps=self.steps,
        )
        places = [self.folder.resolve()] if checkpoints.contains_run(self.folder) else []
        if resume is not None:
            places.append(resume.resolve().parent)
            if training.save_only_model:
                raise ValueError(
                    f"cannot resume {resume}: with save_only_model: true it lacks the state of "
                    "the optimizer; give another --output_dir"
                )
        for place in dict.fromkeys(places):
            done = None if resume is None else checkpoints.step_of(resume)
            identity.require_same_identity(place, now, self.settings, done)
        self.folder.mkdir(parents=True, exist_ok=True)
        identity.write_identity(self.folder, now)

    def _require_whole_sequences(self) -> None:
        """Refuses what would go wrong, unseen, where processes hold parts of a row."""
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        handle = self.prepared.handle
        follows = handle is not None and handle.method.is_length_dependent(handle.trained_length)
        if follows and getattr(parallelism, "sp_enabled", False):
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


@contextlib.contextmanager
def open_run_folder(settings: Settings) -> Iterator[Path | None]:
    """Keep other runs out of the output folder meanwhile.

    Yields:
        The checkpoint to go on from, if any.

    Raises:
        ValueError: Another run works in the folder, or it holds one and nobody said what to do; in
            every process.
        OSError: The folder cannot be locked; in every process.
    """
    folder, resume = Path(str(settings.training.output_dir)), settings.extension.resume

    def look() -> None:
        if resume == "no":
            checkpoints.require_no_run(folder)
        elif checkpoints.contains_run(folder):
            identity.require_identity(folder)

    processes = Processes()
    processes.run_on_main(look)  # ahead of the lock, which would put its file there
    with lock_folder(folder, processes):
        yield processes.run_on_main(lambda: checkpoints.resume_checkpoint(folder, resume))


def total_steps(settings: Settings, tokens_per_step: int) -> int:
    """Optimizer steps: as asked for, or as many as the tokens asked for take."""
    if settings.extension.tokens is not None:
        return math.ceil(settings.extension.tokens / tokens_per_step)
    return settings.training.max_steps


def activation_offloading(settings: Settings) -> Any:
    """While it lasts, what the backward pass needs is kept in the CPU's memory, if asked for."""
    if not settings.extension.offload_activations:
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _command_line() -> str:
    """The command line that started this, on one line."""
    program, *given = sys.argv
    module = ["python", "-m", "rope_patch.recipes.finetune"]
    name = module if Path(program).suffix == ".py" else ["rope-patch"]
    return " ".join(shlex.join([*name, *given]).split())


def mixed_precision(training: Any) -> str:
    """The number format of matrix products, as accelerate calls it.

    As in the Trainer, what the recipe does not say is said by accelerate's config.
    """
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return "bf16" if training.bf16 else given


def keep_loss_exact(accelerator: Any) -> None:
    """Keeps FSDP2 from rounding what modules return, the loss among it, to 16 bits.

    Args:
        accelerator: accelerate's, ahead of its `prepare`.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    if getattr(policy, "output_dtype", None) is not None:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def _is_sharded(model: Any) -> bool:
    """Whether no process has all of the weights."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


class ProcessLayout(NamedTuple):
    """How processes share the work.

    Attributes:
        context_parallel: How many hold parts of the same rows.
        reader_index: This process's place among those that read rows of their own.
        reader_count: How many of these there are.
        replicas: How many rows are trained on at once, for one row in a batch.
    """

    context_parallel: int
    reader_index: int
    reader_count: int
    replicas: int


def process_layout(accelerator: Any) -> ProcessLayout:
    """How accelerate's processes share the work.

    Under DeepSpeed's sequence parallelism each process reads rows of its own, which are dealt out
    in parts, one process's after the other.
    """
    sizes = getattr(accelerator, "parallelism_config", None)
    together = 1 if sizes is None else sizes.cp_size * sizes.tp_size
    readers = accelerator.num_processes // together
    return ProcessLayout(
        context_parallel=1 if sizes is None else sizes.cp_size,
        reader_index=accelerator.process_index // together,
        reader_count=readers,
        replicas=readers // getattr(sizes, "sp_size", 1),
    )
