"""Write checkpoints atomically, find whole ones, and average the last ones.

A checkpoint is written to a temporary folder, listed in a manifest and renamed, so that it counts
only when all of it is on the disk.

The mean of a run's last checkpoints becomes the weights of its finished model. Tensors are read,
averaged in float32 and put into the model one after the other, so that memory stays at that of the
model. LoRA's matrices are not averaged, because the mean of products B·A is not the product of the
means: each checkpoint's product is computed, and their mean is merged. Source: Olmo 3,
arXiv:2512.13961, section 3.6: the 32B model is the mean of its checkpoints of steps 10,000, 11,000
and 11,921.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import FileSystemReader

from rope_patch.utils import atomic_files
from rope_patch.utils.checksums import file_sha256
from rope_patch.utils.errors import parse_json

logger = logging.getLogger("rope_patch")

MANIFEST = "whole.json"  # every file's size and sha256: written last
PREFIX = "checkpoint-"
DATA_STATE = "rows.json"  # where the data go on, and the run's rotation
MODEL = "model"  # the finished model's folder
_TEMPORARY = ".writing"


@contextlib.contextmanager
def atomic_checkpoint(
    folder: Path, step: int, *, is_main: bool, wait: Callable[[], Any], keep: int | None = None
) -> Iterator[Path]:
    """Write a checkpoint that counts only when all of it is on the disk.

    Args:
        folder: The run's folder.
        step: Optimizer steps taken so far.
        is_main: Whether this process moves the files.
        wait: Barrier: returns when every process has called it.
        keep: Checkpoints to keep, this one included; None keeps all. Checkpoints of later steps
            are always deleted.

    Yields:
        The temporary folder in which the caller writes `checkpoint-STEP`.

    Raises:
        OSError: The disk failed; names the checkpoint to resume from. No partial one remains.
    """
    temporary_folder = folder / _TEMPORARY
    if is_main:
        shutil.rmtree(temporary_folder, ignore_errors=True)  # a killed run left it
        temporary_folder.mkdir(parents=True)
    wait()
    with explain_write_errors(folder, f"{PREFIX}{step}"):
        try:
            yield temporary_folder
            wait()
            if is_main:
                checkpoint_folder = temporary_folder / f"{PREFIX}{step}"
                _write_manifest(checkpoint_folder)
                shutil.rmtree(folder / checkpoint_folder.name, ignore_errors=True)
                checkpoint_folder.rename(folder / checkpoint_folder.name)
                atomic_files.sync(folder)
        finally:
            if is_main:
                shutil.rmtree(temporary_folder, ignore_errors=True)
    if is_main:
        existing = _checkpoints(folder)
        # Newer checkpoints are damaged or belong to an abandoned continuation.
        later_checkpoints = [p for p in existing if step_of(p) > step]
        old = [p for p in existing if step_of(p) <= step][:-keep] if keep else []
        for checkpoint in later_checkpoints + old:
            shutil.rmtree(checkpoint, ignore_errors=True)
    wait()


@contextlib.contextmanager
def explain_write_errors(folder: Path, description: str) -> Iterator[None]:
    """Add the free space and the checkpoint to resume from to a failed write's error.

    Args:
        folder: The run's folder.
        description: What the body of the `with` writes.

    Raises:
        OSError: The write failed.
    """

    def advice() -> str:
        last = latest_complete(folder)
        state = f"{last} is whole" if last else "There is no whole checkpoint"
        return f"{state}: REMEDY, and start again with --resume auto"

    with atomic_files.explain_write_errors(folder, description, advice):
        yield


def latest_complete(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None; warn of newer, damaged ones."""
    for checkpoint in reversed(_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint
        logger.warning("%s is passed over: %s", checkpoint, damage)
    return None


def last_complete(folder: Path, count: int) -> list[Path]:
    """Return a run's last checkpoints, the newest last.

    Raises:
        ValueError: There are fewer, or one of them is damaged.
    """
    existing = _checkpoints(folder)
    if len(existing) < count:
        raise ValueError(
            f"expected {count} checkpoints in {folder} (average_checkpoints: {count}), got "
            f"{', '.join(p.name for p in existing) or 'none'}: say --average_checkpoints "
            f"{len(existing) if len(existing) > 1 else 0}"
        )
    for checkpoint in existing[-count:]:
        if damage := find_damage(checkpoint):
            raise ValueError(
                f"{checkpoint} cannot be averaged: {damage}. Remove it to average the ones before "
                "it, or say --average_checkpoints 0, with --resume auto"
            )
    return existing[-count:]


def find_damage(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None if it is complete."""
    try:
        files = parse_json((checkpoint / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was not finished"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    if not isinstance(files, dict) or not files:
        return f"its {MANIFEST} lists no files"
    return find_file_damage(checkpoint, files, MANIFEST)


def find_file_damage(folder: Path, files: dict[str, Any], record: str) -> str | None:
    """Return which file of a folder is not as it was written, or None.

    Args:
        folder: The files' folder.
        files: Each file's size and sha256; see `list_files`.
        record: The file that holds `files`, for the message.
    """
    for name, recorded in files.items():
        path = folder / name
        try:
            size, digest = recorded
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
            if file_sha256(path) != digest:
                return f"{name} is not what was written (its sha256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
        except (ValueError, TypeError):
            return f"its {record} is damaged where it lists {name!r}"
    return None


def resume_checkpoint(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint to resume from.

    Args:
        folder: The run's folder.
        resume: "auto" for the newest complete one, "no", or a checkpoint's path.

    Raises:
        ValueError: The path is no complete checkpoint; or see `require_no_run`.
    """
    if resume == "auto":
        return latest_complete(folder)
    if resume == "no":
        require_no_run(folder)
        return None
    checkpoint = Path(resume)
    if not checkpoint.is_dir() or not _has_checkpoint_name(checkpoint.resolve()):
        raise ValueError(f"no checkpoint {resume}: expected auto, no, or a folder {PREFIX}N")
    if damage := find_damage(checkpoint):
        raise ValueError(f"{checkpoint} is not whole: {damage}; --resume auto finds one that is")
    return checkpoint.resolve()


def require_no_run(folder: Path) -> None:
    """Raise if a folder holds checkpoints or the finished model of a run.

    Raises:
        ValueError: The folder holds a run; says what to do.
    """
    if existing := _checkpoints(folder):
        raise ValueError(
            f"{folder} holds {existing[-1].name} of an earlier run: expected --resume auto to go "
            "on from it, or another --output_dir"
        )
    if (folder / MODEL).exists():
        raise ValueError(
            f"{folder} holds the finished model of an earlier run, which kept no checkpoints: give "
            "another --output_dir, or remove that one first"
        )


def steps_of_checkpoints(folder: Path) -> list[int]:
    """Return the steps of a folder's checkpoints, whole or not, in order."""
    return [step_of(checkpoint) for checkpoint in _checkpoints(folder)]


def contains_run(folder: Path) -> bool:
    """Return whether a folder holds checkpoints, whole or not, or the finished model of a run."""
    return bool(_checkpoints(folder)) or (folder / MODEL).exists()


def step_of(checkpoint: Path) -> int:
    """Return the optimizer steps taken before a checkpoint was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(filter(_has_checkpoint_name, folder.glob(f"{PREFIX}*")), key=step_of)


def _has_checkpoint_name(checkpoint: Path) -> bool:
    return checkpoint.name.startswith(PREFIX) and checkpoint.name.removeprefix(PREFIX).isdecimal()


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, list[Any]]:
    """Flush files to the disk; return each one's size and sha256 by its name within a folder."""
    files = sorted(path for path in paths if path.is_file())
    for path in files:
        atomic_files.sync(path)
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_sha256(path)]
        for path in files
    }


def _write_manifest(checkpoint: Path) -> None:
    manifest = list_files(checkpoint, (p for p in checkpoint.rglob("*") if p.name != MANIFEST))
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    atomic_files.sync(checkpoint / MANIFEST)
    atomic_files.sync(checkpoint)


_FULL_FSDP = "pytorch_model_fsdp.bin"  # accelerate's names
_SHARDED_FSDP = "pytorch_model_fsdp_0"
# Name of a tensor -> a function that reads it.
Tensors = Mapping[str, Callable[[], torch.Tensor]]


def average_into(model: nn.Module, folders: Sequence[Path]) -> None:
    """Set a model's trained weights to the mean of checkpoints.

    With LoRA, the mean change is added to the frozen weights, and the adapters become zero.

    Args:
        model: The model that was trained, unsharded; with PEFT's wrapper if it had one.
        folders: The checkpoints.

    Raises:
        ValueError: A checkpoint lacks a trained tensor, or has it in another shape.
    """
    parameters = dict(model.named_parameters())
    saved_names = _saved_names(model)
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = {folder: stack.enter_context(open_weights(folder)) for folder in folders}

        def read(name: str, folder: Path) -> torch.Tensor:
            tensor = _read(opened[folder], saved_names[name], folder)
            if tensor.shape != parameters[name].shape:
                raise ValueError(
                    f"{folder} has {name} in the shape {tuple(tensor.shape)}, expected "
                    f"{tuple(parameters[name].shape)}: it is of another model"
                )
            return tensor

        in_layers: set[str] = set()
        for layer_name, layer in model.named_modules():
            for adapter in getattr(layer, "active_adapters", ()) if _has_lora(layer) else ():
                names = [
                    name
                    for name in parameters
                    if name.startswith(f"{layer_name}.lora_") and f".{adapter}" in name
                ]
                in_layers.update(names)
                _merge_mean(layer, adapter, {n: parameters[n] for n in names}, read, folders)
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in in_layers:
                parameter.copy_(mean(read(name, folder) for folder in folders))


def mean(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors, accumulated in float32 (float64 for float64)."""
    total, count = None, 0
    for tensor in tensors:
        count += 1
        if total is None:
            total = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        else:
            total += tensor.to(total.device)
    assert total is not None
    return total.div_(count)


def _merge_mean(
    layer: Any,
    adapter: str,
    parameters: dict[str, nn.Parameter],
    read: Callable[[str, Path], torch.Tensor],
    folders: Sequence[Path],
) -> None:
    """Add the mean of an adapter's products to its layer's frozen weights; zero the adapter."""

    def product(folder: Path) -> torch.Tensor:
        for name, parameter in parameters.items():
            parameter.copy_(read(name, folder))
        return layer.get_delta_weight(adapter)

    change = mean(product(folder) for folder in folders)
    weight = layer.get_base_layer().weight
    weight.copy_(weight.to(change.dtype) + change)
    for name, parameter in parameters.items():
        if ".lora_B." in name or ".lora_embedding_B." in name:
            parameter.zero_()


def _has_lora(module: nn.Module) -> bool:
    return hasattr(module, "get_delta_weight") and hasattr(module, "lora_A")


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Tensors]:
    """Open a checkpoint's weights; a tensor is read when its function is called.

    Raises:
        ValueError: The checkpoint has no weights in a known form.
    """
    files = sorted(p for p in folder.glob("*.safetensors") if "model" in p.name)
    if files:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in files]
            yield {name: partial(file.get_tensor, name) for file in opened for name in file.keys()}  # noqa: SIM118
    elif (folder / _FULL_FSDP).is_file():
        mapped = torch.load(folder / _FULL_FSDP, map_location="cpu", mmap=True, weights_only=True)
        yield {name: tensor.clone for name, tensor in mapped.items()}
    elif (folder / _SHARDED_FSDP).is_dir():
        yield _shards(folder / _SHARDED_FSDP)
    else:
        raise ValueError(
            f"{folder} has no weights that can be averaged: expected model.safetensors, "
            f"adapter_model.safetensors, {_FULL_FSDP} or {_SHARDED_FSDP}. With DeepSpeed, set "
            "stage3_gather_16bit_weights_on_model_save: true, or average_checkpoints: 0"
        )


def _shards(folder: Path) -> Tensors:
    """Return the tensors of a checkpoint that torch.distributed wrote."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata

    def read(name: str) -> torch.Tensor:
        stored: Any = metadata[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            # It warns that one process reads, as intended.
            warnings.simplefilter("ignore", UserWarning)
            distributed_checkpoint.load(
                {name: tensor}, storage_reader=FileSystemReader(folder), no_dist=True
            )
        return tensor

    # accelerate puts all of them below "model".
    return {name.removeprefix("model."): partial(read, name) for name in metadata}


def _saved_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names that a checkpoint may have for each parameter."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter.data_ptr(), []).append(name)
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        adapter: Any = model
        saved = get_peft_model_state_dict(adapter, save_embedding_layers=False)
        for name, tensor in saved.items():
            aliases.setdefault(tensor.data_ptr(), []).append(name)
    return {name: aliases[p.data_ptr()] for name, p in model.named_parameters()}


def _read(tensors: Tensors, names: Sequence[str], folder: Path) -> torch.Tensor:
    """Return a tensor that has one of several names."""
    for name in names:
        for key in (name, f"module.{name}"):  # DDP wraps the model in a module
            if key in tensors:
                return tensors[key]()
    raise ValueError(
        f"{folder} has no tensor {names[0]}, so it cannot be averaged: expected a checkpoint of "
        "this run; or average_checkpoints: 0"
    )
