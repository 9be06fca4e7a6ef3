"""The finished model of a run: its weights, whole or averaged, with its tokenizer and card."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from rope_patch.pretrained.saving import save
from rope_patch.training import averaging, checkpoints, identity
from rope_patch.training.model_card import facts_table, write_card
from rope_patch.training.model_setup import adapter_weights, is_lora, prepare_model
from rope_patch.training.settings import Settings

if TYPE_CHECKING:
    from rope_patch.training.run import TrainingRun

logger = logging.getLogger("rope_patch")

_LOGGED_COUNTS = ("documents", "tokens")


def write_finished_model(run: TrainingRun, model: Any) -> Path | None:
    """Write the finished model of a run with its tokenizer and card.

    Args:
        run: The run; its `prepared` and `averaged_steps` are set.
        model: The model as accelerate wrapped it.

    Returns:
        The model's folder, on the main process.

    Raises:
        ValueError: The checkpoints to average are too few, damaged, or of different runs.
        OSError: A file could not be written, with how to go on.
    """
    averages = run.settings.extension.average_checkpoints > 0
    is_sharded = _is_sharded(model)
    # Averages come from the checkpoints' files.
    gathers = is_sharded and not averages
    weights = run.accelerator.get_state_dict(model) if gathers else None
    if not run.is_main:
        return None
    _log_data(run)
    if is_sharded:  # rebuild the unsharded model
        run.prepared = prepare_model(_without_objective(run.settings))
    if weights is not None:
        run.prepared.model.load_state_dict(weights)
    stage = run.settings.stage
    if averages:
        _average_checkpoints(run)
    elif stage is not None and is_lora(run.prepared.model):
        with checkpoints.explain_write_errors(run.folder, stage.adapter.name):
            _write_adapter(run.prepared.model, stage.adapter)
    target = run.folder / checkpoints.MODEL
    run.prepared.mark_trained()
    model_alone = run.prepared.finish()
    with checkpoints.explain_write_errors(run.folder, "the finished model"):
        if run.prepared.handle is None:
            with tempfile.TemporaryDirectory(
                prefix=f".{checkpoints.MODEL}-", dir=run.folder
            ) as temporary_folder:
                model_alone.save_pretrained(temporary_folder)
                target.mkdir(exist_ok=True)
                for file in Path(temporary_folder).iterdir():
                    file.replace(target / file.name)
        else:
            save(model_alone, target)
        run.prepared.tokenizer.save_pretrained(target)
        write_card(run, target)
        if stage is not None:
            stage.write_record(run.steps, facts_table(run))
    logger.info("the model is in %s", target)
    return target


def _log_data(run: TrainingRun) -> None:
    """Log what was read of each source, and what became of it."""
    for source, counts in run.document_counts.items():
        numbers = (f"{counts[k]:,}" for k in _LOGGED_COUNTS)
        logger.info("read of %s: documents %s, tokens %s", source, *numbers)
    for name, summary in run.data_summaries().items():
        logger.info("%s: %s", name, summary)


def _without_objective(settings: Settings) -> Settings:
    """Return settings whose model computes its own loss.

    Only the main process builds it, so probing the loss would wait for the others.
    """
    return replace(
        settings,
        extension=replace(settings.extension, loss="full", z_loss=0.0),
        objective=replace(settings.objective, distillation_weight=0.0),
    )


def _average_checkpoints(run: TrainingRun) -> None:
    """Set the model's weights to the mean of the last checkpoints.

    Raises:
        ValueError: They are too few, damaged, or of different runs.
    """
    count = run.settings.extension.average_checkpoints
    folders = checkpoints.last_complete(run.folder, count)
    identity.require_same_rotation(
        {f: json.loads((f / checkpoints.DATA_STATE).read_text()).get("rotation") for f in folders}
    )
    averaging.average_into(run.prepared.model, folders)
    run.averaged_steps = [checkpoints.step_of(folder) for folder in folders]
    steps = ", ".join(f"{step:,}" for step in run.averaged_steps)
    logger.info("the model is the mean of the checkpoints of steps %s", steps)


def _write_adapter(model: nn.Module, file: Path) -> None:
    """Write what LoRA trained, with which the next stage goes on."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in adapter_weights(model).items()
    }
    save_file(tensors, file)


def _is_sharded(model: Any) -> bool:
    """Return whether no process holds all weights."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
