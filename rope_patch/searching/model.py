"""The model of a search: how it is loaded, and the facts that measurements on it depend on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rope_patch.searching.candidates import SearchSpace
from rope_patch.transformers_api.models import attention_implementation
from rope_patch.transformers_api.remote_code import code_identity
from rope_patch.utils import provenance
from rope_patch.utils.checksums import digest
from rope_patch.utils.installation import version
from rope_patch.utils.processes import Processes


@dataclass(frozen=True)
class ModelSource:
    """A model to measure, live or not loaded yet.

    Attributes:
        name: For texts and results.
        tokenizer: The tokenizer; None only with a live model.
        skeleton: The live model, or one without weights to check requests on.
        load: Returns the live model.
    """

    name: str
    tokenizer: Any
    skeleton: Any
    load: Callable[[], Any]


def open_model(
    model: Any,
    tokenizer: Any,
    processes: Processes,
    *,
    dtype: Any = None,
    device_map: Any = None,
    gguf_file: str | None = None,
) -> ModelSource:
    """Return a model with its tokenizer and name; its weights are loaded later.

    Args:
        model: A live model, which stays on its device, or a folder, a name on the Hub, or `demo`.
        tokenizer: The model's tokenizer; loaded with the model unless given.
        processes: Each process gets the whole model, on its own GPU.
        dtype: The dtype to load in. By default the checkpoint's own on a GPU, else float32.
        device_map: As in transformers.
        gguf_file: The GGUF file within the folder.

    Raises:
        ValueError: No such model, a model saved with a patch, or no such dtype.
    """
    if not isinstance(model, str | os.PathLike):
        name = str(getattr(model.config, "_name_or_path", "") or "a live model")
        return ModelSource(name, tokenizer, model, lambda: model)
    from rope_patch.pretrained import demo
    from rope_patch.pretrained.device_map import placement, require_device
    from rope_patch.pretrained.loading import (
        empty_model,
        read_config,
        read_model,
        read_tokenizer,
        require_dtype,
    )
    from rope_patch.pretrained.sidecar import patch_to_restore

    if isinstance(dtype, str):
        require_dtype(dtype)
    require_device(device_map)
    name, path = str(model), demo.resolve_model_path(str(model))
    if patch_to_restore(path) is not None:
        raise ValueError(
            f"{name} was saved with a patch by rope_patch.save: search on the model that it was "
            "made from, and patch that with the result"
        )
    if tokenizer is None:
        tokenizer = read_tokenizer(path, gguf_file=gguf_file)
    placement_options = placement(dtype, device_map, processes.device)
    skeleton = empty_model(path, read_config(path, gguf_file=gguf_file))

    def load() -> Any:
        return read_model(path, **placement_options, gguf_file=gguf_file)

    return ModelSource(name, tokenizer, skeleton, load)


def run_identity(model: Any, space: SearchSpace) -> dict[str, Any]:
    """Return the facts that measurements depend on, besides samples and candidates, as data."""
    geometry = space.geometry
    base = json.dumps(geometry.inv_freq().tolist()).encode()
    return {
        "weights": provenance.fingerprint(model),
        **code_identity(model),
        "config": provenance.config_fingerprint(model.config),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "attention": attention_implementation(model.config),
        "theta": geometry.theta,
        "rotary_dim": geometry.rotary_dim,
        "layer_type": geometry.layer_type,
        "rotation": digest(base, 16),
        "trained_length": geometry.trained_length,
        "factor": space.factor,
    }


def dependency_versions() -> dict[str, str]:
    """Return the versions that measurements and proposals depend on."""
    versions = provenance.versions()
    return {
        **{name: versions[name] for name in ("rope_patch", "transformers", "torch")},
        "optuna": version("optuna"),
    }


def plain_config(model: Any) -> dict[str, Any]:
    """Return the model's config as plain data, without its path on this machine."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    return config


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode; restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
