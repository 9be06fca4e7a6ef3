"""The identity of a run: everything its numbers depend on, stored in the run's folder.

A run resumes, or counts as finished, only under the recipe it began with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_patch.patching import Patch
from rope_patch.patching.method_wrappers import method_origin
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_config
from rope_patch.pretrained.sidecar import read_sidecar
from rope_patch.runs.run_folder import RunFolder
from rope_patch.training import optimizer
from rope_patch.training.data import readers
from rope_patch.training.data.arguments import ineffective_keys
from rope_patch.training.data.documents import compressor
from rope_patch.training.model_setup import PreparedModel
from rope_patch.training.settings import Settings
from rope_patch.transformers_api.remote_code import code_identity
from rope_patch.utils import checksums
from rope_patch.utils.provenance import versions

logger = logging.getLogger("rope_patch")

FILE = "identity.json"
FORMAT = "rope_patch.recipes/1"

# Keys that may change when a run resumes. All other keys of a recipe are its identity.
_CHANGEABLE_KEYS = {
    "place, and when to stop or measure": "output_dir plugin resume ignore_plan max_loss_rise "
    "retrieval_steps max_steps tokens",
    "permission": "anyway",
    "saving": "average_checkpoints save_strategy save_steps save_total_limit save_on_each_node "
    "enable_jit_checkpoint",
    "logging": "logging_strategy logging_steps logging_first_step logging_dir log_level "
    "log_level_replica log_on_each_node disable_tqdm report_to project run_name trackio_space_id "
    "trackio_bucket_id trackio_static_space_id",
    # The rows per optimizer step (the first two times the processes) must stay the same.
    "devices": "per_device_train_batch_size gradient_accumulation_steps use_cpu local_rank fsdp "
    "fsdp_config parallelism_config ddp_backend ddp_timeout ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph",
    "memory": "gradient_checkpointing activation_checkpointing offload_activations "
    "torch_empty_cache_steps",
    "reading ahead": "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
}
CHANGEABLE_KEYS = frozenset(key for keys in _CHANGEABLE_KEYS.values() for key in keys.split())
_VERSIONS = ("rope_patch", "transformers", "torch")
_COMPARED_BY_CONTENTS = {
    "model",
    "options",
    "data",
    "short_data",
}  # compared by contents, not by name
# Keys that earlier releases lacked, with the value that does as those did: their runs resume.
_DEFAULTS_OF_NEW_KEYS = {
    "positions": "consecutive",
    "z_loss": 0.0,
    "decay_embeddings": True,
    "start": "auto",
    "distillation_weight": 0.0,
    "distillation_temperature": 1.0,
    "carry_optimizer": False,
    "trust_remote_code": False,
}
_ROTATION = (
    "model", "method", "options", "factor", "length", "trained_length", "layer_types", "start",
    "frequencies", "positions", "lora_rank", "lora_alpha", "lora_targets", "lora_trains",
)  # fmt: skip
_NAME_KEY = "name"  # name of a model or source: shown in messages, not compared


def identity_of(
    settings: Settings,
    prepared: PreparedModel,
    *,
    loop: bool,
    precision: str,
    rows: int,
    steps: int,
) -> dict[str, Any]:
    """Return everything a run's numbers depend on, as JSON data.

    Args:
        settings: The recipe.
        prepared: The recipe's model.
        loop: Whether `recipes/experiments/training_loop.py` takes the steps, not the Trainer.
        precision: Number format of matrix products.
        rows: Rows per optimizer step, over all processes.
        steps: Total optimizer steps.
    """
    identity = {
        "model": {_NAME_KEY: settings.extension.model, "weights": prepared.weights},
        **code_identity(prepared.model),
        **_outside_frequencies(prepared.handle),
        "tokenizer": _tokenizer_fingerprint(prepared.tokenizer),
        **recipe_identity(settings, loop=loop, precision=precision, rows=rows, steps=steps),
    }
    return json.loads(json.dumps(identity, default=str))


def recipe_identity(
    settings: Settings, *, loop: bool, precision: str, rows: int, steps: int
) -> dict[str, Any]:
    """Return the part of a run's identity that needs no weights; see `identity_of`."""
    path = demo.resolve_model_path(settings.extension.model)
    config = read_config(path).to_dict()
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    identity = {
        **{
            key: value
            for key, value in settings.values().items()
            if key not in CHANGEABLE_KEYS and key not in _COMPARED_BY_CONTENTS
        },
        "options": settings.method_options,
        **{
            key: [{_NAME_KEY: n, "contents": readers.fingerprint(n)} for n in names or []]
            for key, names in (
                ("data", settings.data.data),
                ("short_data", settings.data.short_data),
            )
        },
        "loop": loop,
        "precision": precision,
        "rows of a step": rows,
        "steps": steps,
        "config.rope_patch": read_sidecar(path),
        **dict(_flatten(config, "config")),
    }
    if settings.data.compression_ratio is not None:
        identity["compressor"] = compressor()
    unused = {key for key, value in _DEFAULTS_OF_NEW_KEYS.items() if identity[key] == value}
    for key in unused | ineffective_keys(settings.data):
        del identity[key]
    return json.loads(json.dumps(identity, default=str))


def rotation_of(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that weights must share to be averaged.

    Requests, not frequencies: they are read of checkpoints, without a model, and LoRA's are among
    them.
    """
    return {key: identity[key] for key in _ROTATION if key in identity}


def require_same_rotation(rotations: dict[Path, dict[str, Any] | None]) -> None:
    """Raise if checkpoints are of different models or rotations.

    Args:
        rotations: By checkpoint, what `rotation_of` says of its run; None if unknown.

    Raises:
        ValueError: Two of them differ; names the keys.
    """
    known = {folder: rotation for folder, rotation in rotations.items() if rotation is not None}
    *others, last = known or [Path()]
    for folder in others:
        text = f"{{name}} was {{old}}, in {last.name} {{new}}"
        if differences := _differences(last, known[folder], known[last], text):
            raise ValueError(
                f"{folder} and {last} cannot be averaged, they are of different runs: "
                + "; ".join(differences.values())
            )


def require_same_identity(
    folder: Path, identity: dict[str, Any], settings: Settings, steps_done: int | None
) -> None:
    """Raise unless a folder holds a run of this identity.

    The number of steps may differ. If that changes the learning rates of the steps already taken, a
    warning is logged.

    Args:
        folder: The run's folder.
        identity: Identity of the run to resume there.
        settings: Recipe of that run.
        steps_done: Steps taken, or None if there is no checkpoint to resume from.

    Raises:
        ValueError: The identity differs (names each key with both values), is missing, or is
            damaged.
    """
    training = settings.training
    stored, stored_versions = _read_identity(folder)
    current_versions = _versions()
    differences = _differences(folder, stored, identity)
    differences.pop("steps", None)  # compared below
    if stored_versions != current_versions:
        known = stored.keys() & identity.keys()
        differences = {name: text for name, text in differences.items() if name in known}
        logger.warning(
            "%s began with %s and goes on with %s: results may differ by more than rounding",
            folder,
            _format_versions(stored_versions),
            _format_versions(current_versions),
        )
    if "model" in differences:
        differences = {
            name: text for name, text in differences.items() if not name.startswith("config.")
        }
    stored_steps, new_steps = stored["steps"], identity["steps"]
    if stored_steps != new_steps and (steps_done is None or steps_done > new_steps):
        progress = (
            "there is no checkpoint to go on from"
            if steps_done is None
            else f"{steps_done} are taken"
        )
        differences["steps"] = f"steps was {stored_steps}, got {new_steps} ({progress})"
    if differences:
        raise ValueError(
            f"cannot resume {folder}, it holds the run of another recipe: "
            f"{'; '.join(differences.values())}. Set that back, or give another --output_dir; "
            "nothing was changed there"
        )
    if (
        stored_steps != new_steps
        and steps_done is not None
        and not optimizer.same_rates(training, stored_steps, new_steps, steps_done)
    ):
        logger.warning(
            "%s was begun for %s steps and goes on for %s: its %s steps had the learning rates of "
            "the former, and the rest gets those of the latter (lr_scheduler_type %s), so the "
            "result is that of neither",
            folder,
            f"{stored_steps:,}",
            f"{new_steps:,}",
            f"{steps_done:,}",
            getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type),
        )


def require_same_recipe(folder: Path, settings: Settings, **recipe: Any) -> None:
    """Raise unless a folder holds a finished run of a recipe; its weights are not compared.

    Args:
        folder: The folder.
        settings: The recipe.
        **recipe: See `recipe_identity`.

    Raises:
        ValueError: See `require_same_identity`.
    """
    stored, _ = _read_identity(folder)
    new_identity = {**stored, **recipe_identity(settings, **recipe)}
    require_same_identity(folder, new_identity, settings, None)


def steps_of_run(folder: Path) -> int:
    """Return the total optimizer steps in a run's identity."""
    return int(_read_identity(folder)[0]["steps"])


def require_identity(folder: Path) -> None:
    """Raise unless a folder has a readable identity.

    Raises:
        ValueError: The identity is missing, damaged, or of another format version.
    """
    _read_identity(folder)


def write_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Write a run's identity into its folder, unless the same one is there."""
    if (folder / FILE).is_file() and _read_identity(folder)[0] == identity:
        return
    body = {"format": FORMAT, "versions": _versions(), "identity": identity}
    RunFolder(folder).write(FILE, body)


def _read_identity(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a run's identity and the library versions it began with."""
    path = folder / FILE
    remedy = "give another --output_dir; nothing was changed there"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds a run without {FILE}, which says what its numbers depend on: it is of "
            f"an earlier version of rope-patch, or was copied in part. Bring {FILE} back, or "
            f"{remedy}"
        )
    try:
        body = RunFolder(folder).read(FILE)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; bring it back from a copy, or {remedy}") from error
    if body.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {body.get('format')}: {remedy}")
    return body["identity"], body["versions"]


def _outside_frequencies(handle: Patch | None) -> dict[str, Any]:
    """Return a digest of the rotation if the method is not ours, since its file may change."""
    if handle is None or method_origin(handle.method) is None:
        return {}
    lengths = (1, handle.trained_length, handle.length or 2 * handle.trained_length)
    # Not `Frequencies.key`: folders of earlier releases hold the digest of the numbers as written.
    numbers = [
        [str(layer_type), frequencies.attention_factor, frequencies.inv_freq.tolist()]
        for length in lengths
        for layer_type, frequencies in handle.frequencies_at(length).items()
    ]
    return {"frequencies": checksums.digest(json.dumps(numbers), 32)}


def _versions() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name in _VERSIONS}


def _format_versions(versions_by_name: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions_by_name.items())


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary, end token, and tokens of one sentence."""
    sentence = "It's 1813: \tthe truth, universally acknowledged.\n  Ça va?"
    parts = (
        sorted(tokenizer.get_vocab().items()),
        tokenizer.eos_token_id,
        tokenizer(sentence).input_ids,
    )
    return f"sha256:{checksums.digest(json.dumps(parts), 32)}"


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}")
    else:
        yield name, value


def _differences(
    folder: Path, stored: dict[str, Any], identity: dict[str, Any], *text: str
) -> dict[str, str]:
    """Return what two identities have otherwise, but for the names of models and sources."""
    run = RunFolder(folder, identity)
    return run.differences(stored, *text, show=_as_text, compared=_without_names)


def _without_names(value: Any) -> Any:
    """Return a value without names: a moved folder is the same model or data."""
    if isinstance(value, list):
        return [_without_names(item) for item in value]
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key != _NAME_KEY}
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
