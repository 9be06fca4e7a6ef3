"""Errors of other libraries in loading, in words that help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rope_patch.utils.errors import describe_error, one_line

MAX_LENGTH = 400  # characters of another library's error


def loading_error(path: str | os.PathLike[str], error: Exception, what: str = "") -> ValueError:
    """Return the error for a checkpoint that another library could not read."""
    is_readable = isinstance(error, ValueError | OSError | SafetensorError)  # written for readers
    message = (one_line(str(error), MAX_LENGTH) if is_readable else "") or describe_error(
        error, MAX_LENGTH
    )
    if Path(path).is_dir():
        return ValueError(f"cannot load {what}{path}: {message}")
    return ValueError(
        f"cannot load {what}{str(path)!r}: there is no such folder, and the Hugging Face Hub did "
        f"not give a model of that name ({message}); check the name, the network and "
        "HF_HUB_OFFLINE, or give a local folder"
    )


def no_decoder_error(path: str | os.PathLike[str], config: Any) -> ValueError:
    """Return the error for a model that `auto_class` finds no class for."""
    model_type = getattr(config, "model_type", type(config).__name__)
    return ValueError(
        f"cannot load {path}: transformers has no causal language model of the type "
        f"{model_type!r}, with images or without; if it generates text in another way, load it in "
        "Python with its own class and call rope_patch.patch(model, ...). `rope-patch diagnose` "
        "reads its config as it is"
    )
