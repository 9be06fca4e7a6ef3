"""The model of a search: read where it is a name, and what its measurements depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rope_patch.searching.candidates import SearchSpace
from rope_patch.utils import provenance
from rope_patch.utils.processes import Processes
from rope_patch.utils.versions import version


@dataclass(frozen=True)
class ModelSource:
    """A model to measure, live or not read yet.

    Attributes:
        name: To show.
        tokenizer: None only with a live model.
        skeleton: The live model, or one without weights on which requests can be checked.
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
    """Return a model with its tokenizer and name; weights are not read yet.

    Args:
        model: A live model, which stays where it is, or a folder, a name on the Hub, or `demo`.
        tokenizer: Its tokenizer; read with a model that is read.
        processes: Each gets the whole model, on its own GPU.
        dtype: To read in; what the checkpoint was saved in on a GPU, float32 elsewhere, unless
            given.
        device_map: As in transformers.
        gguf_file: The GGUF file within the folder.

    Raises:
        ValueError: There is no such model, it was saved with a patch, or no such dtype.
    """
    if not isinstance(model, str | os.PathLike):
        name = str(getattr(model.config, "_name_or_path", "") or "a live model")
        return ModelSource(name, tokenizer, model, lambda: model)
    import torch

    from rope_patch.pretrained import demo
    from rope_patch.pretrained.device_map import require_device
    from rope_patch.pretrained.loading import (
        empty_model,
        read_config,
        read_model,
        read_tokenizer,
        require_dtype,
    )
    from rope_patch.pretrained.saving import read_sidecar

    if isinstance(dtype, str):
        require_dtype(dtype)
    require_device(device_map)
    name, path = str(model), demo.resolve_model_path(str(model))
    if read_sidecar(path) is not None:
        raise ValueError(
            f"{name} was saved with a patch by rope_patch.save: search on the model that it was "
            "made from, and patch that with the result"
        )
    if tokenizer is None:
        tokenizer = read_tokenizer(path, gguf_file=gguf_file)
    gpu = torch.cuda.is_available()
    if dtype in (None, "auto"):
        dtype = "auto" if gpu else torch.float32
    elif isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    where = device_map or ("auto" if gpu else None)
    if processes.device is not None and processes.device.type != "cpu":
        where = {"": processes.device}
    sketch = empty_model(path, read_config(path, gguf_file=gguf_file))

    def read() -> Any:
        return read_model(path, dtype=dtype, device_map=where, gguf_file=gguf_file)

    return ModelSource(name, tokenizer, sketch, read)


def run_identity(model: Any, space: SearchSpace) -> dict[str, Any]:
    """What measurements depend on besides samples and candidates, as JSON can hold it."""
    geometry = space.geometry
    base = json.dumps(geometry.inv_freq().tolist()).encode()
    return {
        "weights": provenance.fingerprint(model),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "theta": geometry.theta,
        "rotary_dim": geometry.rotary_dim,
        "layer_type": geometry.layer_type,
        "rotation": hashlib.sha256(base).hexdigest()[:16],
        "trained_length": geometry.trained_length,
        "factor": space.factor,
    }


def dependency_versions() -> dict[str, str]:
    """Versions that measurements and proposals depend on."""
    found = provenance.versions()
    return {
        **{name: found[name] for name in ("rope_patch", "transformers", "torch")},
        "optuna": version("optuna"),
    }


def plain_config(model: Any) -> dict[str, Any]:
    """The model's config as plain data, without where on this machine it was read from."""
    said = model.config.to_dict()
    said.pop("_name_or_path", None)
    return said


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """The model in evaluation mode, and every module as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
