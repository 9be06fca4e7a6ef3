"""The identity of a run: everything its numbers depend on, kept in the run's folder.

A run goes on, or counts as finished, only under the recipe it began with.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_config
from rope_patch.pretrained.saving import read_sidecar
from rope_patch.training import checkpoints, documents, schedule
from rope_patch.training.model_setup import PreparedModel
from rope_patch.training.settings import Settings
from rope_patch.utils import atomic_files, checksums
from rope_patch.utils.provenance import versions

logger = logging.getLogger("rope_patch")

FILE = "identity.json"
FORMAT = "rope_patch.recipes/1"

# Keys that a run may go on with other values of. All other keys of a recipe are its identity.
_MAY_CHANGE = {
    "place, and when to stop or measure": "output_dir resume ignore_plan max_loss_rise "
    "retrieval_steps max_steps tokens",
    "saving": "save_strategy save_steps save_total_limit save_on_each_node enable_jit_checkpoint",
    "logging": "logging_strategy logging_steps logging_first_step logging_dir log_level "
    "log_level_replica log_on_each_node disable_tqdm report_to project run_name trackio_space_id "
    "trackio_bucket_id trackio_static_space_id",
    # The rows of an optimizer step, a product of the first two and the processes, must stay.
    "devices": "per_device_train_batch_size gradient_accumulation_steps use_cpu local_rank fsdp "
    "fsdp_config parallelism_config ddp_backend ddp_timeout ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph",
    "memory": "gradient_checkpointing activation_checkpointing offload_activations "
    "torch_empty_cache_steps",
    "reading ahead": "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
}
MAY_CHANGE = frozenset(key for keys in _MAY_CHANGE.values() for key in keys.split())
_VERSIONS = ("rope_patch", "transformers", "torch")
_COMPARED_BY_CONTENTS = {
    "model",
    "options",
    "data",
    "short_data",
}  # keys that are compared by their contents
_NAME_KEY = "name"  # of a model or a source: shown, not compared


def identity_of(
    settings: Settings,
    prepared: PreparedModel,
    *,
    loop: bool,
    precision: str,
    rows: int,
    steps: int,
) -> dict[str, Any]:
    """Return what a run's numbers depend on, as JSON can hold it.

    Args:
        settings: The recipe.
        prepared: Its model.
        loop: Whether the plain loop takes the steps, not the Trainer.
        precision: The number format of matrix products.
        rows: Rows of an optimizer step, over all processes.
        steps: Optimizer steps in all.
    """
    path = demo.resolve_model_path(settings.extension.model)
    config = read_config(path).to_dict()
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    identity = {
        "model": {_NAME_KEY: settings.extension.model, "weights": prepared.weights},
        **{
            key: value
            for key, value in settings.values().items()
            if key not in MAY_CHANGE and key not in _COMPARED_BY_CONTENTS
        },
        "options": settings.method_options,
        **{
            key: [{_NAME_KEY: n, "contents": documents.fingerprint(n)} for n in names or []]
            for key, names in (
                ("data", settings.data.data),
                ("short_data", settings.data.short_data),
            )
        },
        "tokenizer": _tokenizer_fingerprint(prepared.tokenizer),
        "loop": loop,
        "precision": precision,
        "rows of a step": rows,
        "steps": steps,
        "config.rope_patch": read_sidecar(path),
        **dict(_flatten(config, "config")),
    }
    return json.loads(json.dumps(identity, default=str))


def require_same_identity(
    folder: Path, identity: dict[str, Any], settings: Settings, done: int | None
) -> None:
    """Raise unless a folder's run is of this identity.

    The number of steps may differ; a warning says so where the schedule of the learning rate, which
    follows from it, would have been another one for the steps taken.

    Args:
        folder: The folder of a run.
        identity: Of the run that is to go on there.
        settings: Its recipe.
        done: Steps taken, or None if there is no checkpoint to go on from.

    Raises:
        ValueError: Names each key that differs, with both values; or the folder's identity is
            missing or damaged.
    """
    training = settings.training
    there, began_with = _read_identity(folder)
    here_with = _versions()
    names = dict.fromkeys([*there, *identity])
    if began_with != here_with:
        names = {name: None for name in names if name in there and name in identity}
        logger.warning(
            "%s began with %s and goes on with %s: results may differ by more than rounding",
            folder,
            _format_versions(began_with),
            _format_versions(here_with),
        )
    if _without_names(there["model"]) != _without_names(identity["model"]):
        names = {name: None for name in names if not name.startswith("config.")}
    differences = [
        f"{name} was {_abbreviate(there.get(name))}, got {_abbreviate(identity.get(name))}"
        for name in names
        if name != "steps" and _without_names(there.get(name)) != _without_names(identity.get(name))
    ]
    before, now = there["steps"], identity["steps"]
    if before != now and (done is None or done > now):
        taken = "there is no checkpoint to go on from" if done is None else f"{done} are taken"
        differences.append(f"steps was {before}, got {now} ({taken})")
    if differences:
        raise ValueError(
            f"cannot resume {folder}, it holds the run of another recipe: "
            f"{'; '.join(differences)}. Set that back, or give another --output_dir; nothing was "
            "changed there"
        )
    if before != now and done is not None and not schedule.same_rates(training, before, now, done):
        logger.warning(
            "%s was begun for %s steps and goes on for %s: its %s steps had the learning rates of "
            "the former, and the rest gets those of the latter (lr_scheduler_type %s), so the "
            "result is that of neither",
            folder,
            f"{before:,}",
            f"{now:,}",
            f"{done:,}",
            getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type),
        )


def require_identity(folder: Path) -> None:
    """Raise unless a folder says which run it holds.

    Raises:
        ValueError: Its identity is missing, damaged, or of another version of this format.
    """
    _read_identity(folder)


def write_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Write a run's identity into its folder, unless the folder says the same already."""
    path = folder / FILE
    if path.is_file() and _read_identity(folder)[0] == identity:
        return
    body = {"format": FORMAT, "versions": _versions(), "identity": identity}
    atomic_files.write_json(path, checksums.seal(body))
    checkpoints.sync(path)
    checkpoints.sync(folder)


def _read_identity(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a run's identity, and the versions that it began with."""
    path = folder / FILE
    another = "give another --output_dir; nothing was changed there"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds a run without {FILE}, which says what its numbers depend on: it is of "
            f"an earlier version of rope-patch, or was copied in part. Bring {FILE} back, or "
            f"{another}"
        )
    try:
        body = checksums.unseal(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}; bring it back from a copy, or {another}") from error
    if body.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {body.get('format')}: {another}")
    return body["identity"], body["versions"]


def _versions() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name in _VERSIONS}


def _format_versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    """Tell tokenizers apart: by vocabulary, end token, and a sentence's tokens."""
    sentence = "It's 1813: \tthe truth, universally acknowledged.\n  Ça va?"
    parts = (
        sorted(tokenizer.get_vocab().items()),
        tokenizer.eos_token_id,
        tokenizer(sentence).input_ids,
    )
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}")
    else:
        yield name, value


def _without_names(value: Any) -> Any:
    """A value without names: a folder that was moved is the same model or data."""
    if isinstance(value, list):
        return [_without_names(item) for item in value]
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key != _NAME_KEY}
    return value


def _abbreviate(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:140]}... ({len(text)} characters)"
