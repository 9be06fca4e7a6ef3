"""The mean of a run's last checkpoints, as the weights of its finished model.

Tensors are read, averaged in float32 and put into the model one after the other, so that memory
stays at that of the model. LoRA's matrices are not averaged, because the mean of products B·A is
not the product of the means: each checkpoint's product is computed, and their mean is merged.

Source: Olmo 3, arXiv:2512.13961, section 3.6: the 32B model is the mean of its checkpoints of steps
10,000, 11,000 and 11,921.
"""

from __future__ import annotations

import contextlib
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
            warnings.simplefilter("ignore", UserWarning)  # that one process reads, which is meant
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
    """Return a tensor that has one of several names.

    Raises:
        ValueError: There is none.
    """
    for name in names:
        for key in (name, f"module.{name}"):  # DDP wraps the model in a module
            if key in tensors:
                return tensors[key]()
    raise ValueError(
        f"{folder} has no tensor {names[0]}, so it cannot be averaged: expected a checkpoint of "
        "this run; or average_checkpoints: 0"
    )
