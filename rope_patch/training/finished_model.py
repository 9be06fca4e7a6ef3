"""The finished model of a run: its weights, whole or averaged, its tokenizer and its card."""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from rope_patch.pretrained.model_card import card_header, card_title, loading_snippet, made_by
from rope_patch.pretrained.saving import save
from rope_patch.pretrained.sidecar import read_sidecar
from rope_patch.training import checkpoints, identity
from rope_patch.training.model_setup import adapter_weights, is_lora, prepare_model
from rope_patch.training.monitor import read_log, read_scores
from rope_patch.training.objective.arguments import ObjectiveArguments
from rope_patch.training.run import TrainingRun
from rope_patch.training.settings import Settings
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import escape_markdown

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
    run.progress.close()
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
    """Return settings whose model computes its own loss."""
    # Only the main process builds this model, so probing its loss would wait for the others.
    return replace(
        settings,
        extension=replace(settings.extension, loss="full", z_loss=0.0),
        objective=replace(settings.objective, distillation_weight=0.0),
    )


def _average_checkpoints(run: TrainingRun) -> None:
    """Set the model's weights to the mean of the last checkpoints."""
    count = run.settings.extension.average_checkpoints
    folders = checkpoints.last_complete(run.folder, count)
    identity.require_same_rotation(
        {f: json.loads((f / checkpoints.DATA_STATE).read_text()).get("rotation") for f in folders}
    )
    checkpoints.average_into(run.prepared.model, folders)
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


def write_card(run: Any, folder: Path) -> None:
    """Write `README.md` into a finished model's folder.

    Args:
        run: The finished run.
        folder: The model's folder.
    """
    atomic_files.atomic_write(folder / "README.md", render_card(run, folder))


def render_card(run: Any, folder: Path) -> str:
    """Return the card as Markdown, with the Hub's YAML header."""
    settings, prepared = run.settings, run.prepared
    extension = settings.extension
    target = _method_and_target(run)[1]
    command = shlex.join(["rope-patch", "finetune", "--config", "recipe.yaml"])
    return f"""{card_header(extension.model, extension.method)}

# {card_title(extension.model)}, {prepared.trained_length:,} → {target}

{_stages_section(run)}
{_scores_section(run.folder)}
## Use

{loading_snippet(read_sidecar(folder))}

{made_by(command)}
"""


def facts_table(run: Any) -> str:
    """Return a table of how a run trained, as Markdown."""
    settings, prepared = run.settings, run.prepared
    extension, training = settings.extension, settings.training
    tokens = f"{run.steps * run.tokens_per_step:,}"
    method, target = _method_and_target(run)
    weights = (
        "all weights"
        if not extension.lora_rank
        else f"LoRA of rank {extension.lora_rank}; in full: "
        f"{', '.join(map(escape_markdown, extension.lora_trains))}"
    )
    summaries = run.data_summaries().items()
    data = ", ".join(map(escape_markdown, settings.data.data))
    data_rows = "".join(_row(name, text) for name, text in summaries)
    return f"""| | |
|:--|:--|
| method | {escape_markdown(method)} |
| trained length before | {prepared.trained_length:,} tokens |
| target length | {target} |
| fine-tuned on | {tokens} tokens: {run.steps:,} steps × {run.rows_per_step} × \
{prepared.row_length:,} |
| what was trained | {weights}{_average_summary(run.averaged_steps)} |
| learning rate | {training.learning_rate:g}, {_enum_value(training.lr_scheduler_type)}, \
{training.warmup_steps:g} warm-up steps |
| weight decay | {_decay_summary(settings)} |
| data | {data}; packing {settings.data.packing}, short rows \
{settings.data.short_share:.0%}, positions {settings.data.positions} |
{data_rows}\
{_row("short rows", _distillation_summary(settings.objective))}\
| loss | {_loss_summary(read_log(run.folder), extension.z_loss)} |"""


def _method_and_target(run: Any) -> tuple[str, str]:
    prepared = run.prepared
    if prepared.handle is None:
        return "none (the rotation is as it was)", f"{prepared.target_length:,} tokens"
    length = prepared.handle.length
    target = "any length" if length is None else f"{length:,} tokens"
    return str(prepared.handle.method), target


def _stages_section(run: Any) -> str:
    """Return the table of a run; with stages, that of each one up to it."""
    stage = run.settings.stage
    if stage is None:
        return facts_table(run)
    tables, before = [facts_table(run)], stage.previous
    while before is not None:
        record = before.read_record()
        tables.insert(0, "not recorded" if record is None else record["facts"])
        before = before.previous
    sections = [f"## Stage {number}\n\n{table}" for number, table in enumerate(tables, start=1)]
    note = (
        "Trained in stages. Each began with the weights of the one before"
        + (", and went on with its LoRA adapter" if run.settings.extension.lora_rank else "")
        + "; its rotation was computed from the original model."
    )
    return "\n\n".join([note, *sections])


def _distillation_summary(objective: ObjectiveArguments) -> str:
    if not objective.distillation_weight:
        return ""
    return (
        f"distilled from the original model: weight {objective.distillation_weight:g}, "
        f"temperature {objective.distillation_temperature:g}"
    )


def _row(name: str, summary: str) -> str:
    return f"| {escape_markdown(name)} | {escape_markdown(summary)} |\n" if summary else ""


def _loss_summary(log: list[dict[str, Any]], z_loss: float) -> str:
    with_terms = f" (with z-loss, {z_loss:g})" if z_loss else ""
    if not log:
        return f"not logged{with_terms}"
    first, last = log[0], log[-1]
    return f"{first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at the end{with_terms}"


def _average_summary(steps: list[int]) -> str:
    names = ", ".join(f"{step:,}" for step in steps)
    return f"; the mean of the checkpoints of steps {names}" if steps else ""


def _decay_summary(settings: Any) -> str:
    decay = settings.training.weight_decay
    if not decay:
        return "none"
    undecayed = (
        "norms and biases"
        if settings.extension.decay_embeddings
        else ("embeddings, norms and biases")
    )
    return f"{decay:g}; none on {undecayed}"


def _scores_section(folder: Path) -> str:
    scores = read_scores(folder)
    if not scores:
        return (
            "\nNothing is said here of what the model retrieves at its new length: measure it with "
            "`rope-patch eval`.\n"
        )
    lines = [
        f"\n## Needles at {scores[0]['length']:,} tokens, {scores[0]['samples']} samples\n",
        "| step | found | probability of the answer |",
        "|--:|--:|--:|",
    ]
    for row in scores:
        lines.append(
            f"| {row['step']:,} | {row['retrieval_hits']:.2f} | "
            f"{row['retrieval_probability']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _enum_value(value: Any) -> str:
    return str(getattr(value, "value", value))
