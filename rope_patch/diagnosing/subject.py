"""Subjects of a diagnosis: a live model, a config, a folder, a Hub name, an adapter's folder."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from rope_patch.patching import Patch, current
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_rotaries
from rope_patch.pretrained import demo
from rope_patch.pretrained.adapters import adapter_base, is_adapter
from rope_patch.pretrained.gguf import split_gguf
from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.pretrained.saving import ADAPTER_CONFIG
from rope_patch.pretrained.sidecar import read_sidecar
from rope_patch.transformers_api.remote_code import code_identity, trust_argument
from rope_patch.utils.errors import Refused, describe_error, parse_json


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to diagnose, and its source.

    Attributes:
        config: The decoder's config without an active patch.
        model: The model; without weights if built from a config; None if it cannot be built.
        live: Whether the caller passed a model.
        rotaries: The model's rotary modules.
        problem: Why there is no model or no rotary module, or None.
        handle: The active patch of a live model, or None.
        raw_config: The decoder's part of the raw config.json; empty unless read from a path.
        sidecar: Content of `rope_patch.json` beside config.json or the adapter, or None.
        adapter: Content of adapter_config.json for an adapter; else empty.
        adapter_path: The adapter's folder.
        path: Source of the config, or of the live model if its config names one.
        display_name: The model's name in Python and, quoted, in command lines.
        is_loadable: Whether `rope_patch.load` can load it.
    """

    config: Any
    model: nn.Module | None
    live: bool
    rotaries: list[RotaryModule]
    problem: str | None = None
    handle: Patch | None = None
    raw_config: dict[str, Any] = field(default_factory=dict)
    sidecar: dict[str, Any] | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    adapter_path: str = ""
    path: str = ""
    display_name: str = "MODEL"
    is_loadable: bool = True

    @property
    def trust_option(self) -> str:
        """Return what command lines need if the model's class is the checkpoint's own code."""
        is_own = self.model is not None and code_identity(self.model)
        return " --trust-remote-code" if is_own else ""

    def patch_call(self, method: str, arguments: str) -> str:
        """Return the line of Python that extends the model."""
        rest = f'"{method}"' + (f", {arguments}" if arguments else "")
        if self.live or not self.path or not self.is_loadable:
            return f"rope_patch.patch(model, {rest})"
        name = self.path if self.adapter else self.display_name
        rest += ", trust_remote_code=True" if self.trust_option else ""
        return f"model = rope_patch.load({name!r}, {rest})"


def open_subject(
    model: Any, *, gguf_file: str | None = None, display_name: str | None = None
) -> Subject:
    """Return the subject of a model, config or path, with its files read.

    Args:
        model: A model, a config, a folder, a name on the Hub, or an adapter's folder.
        gguf_file: The GGUF file within a folder.
        display_name: The model's name in lines to copy, if it is not its path.

    Raises:
        ValueError: There is no such model, or it cannot be read.
        TypeError: `model` is none of these.
    """
    if isinstance(model, nn.Module):
        return _from_model(model, display_name)
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        if name == "demo":
            display_name = display_name or name
        return _from_path(demo.resolve_model_path(name), gguf_file, display_name)
    if isinstance(model, PreTrainedConfig):
        path = str(getattr(model, "_name_or_path", "") or "")
        return _without_weights(model, path="", display_name=display_name or path or "MODEL")
    raise TypeError(
        "expected a transformers model, a config, a folder or a name on the Hub, got "
        f"{type(model).__name__}"
    )


def _from_model(model: nn.Module, display_name: str | None) -> Subject:
    handle = current(model)
    full_config: Any = getattr(model, "config", None)
    if not isinstance(full_config, PreTrainedConfig):
        raise ValueError(
            f"{type(model).__name__} has no transformers config: expected a transformers model"
        )
    config = full_config.get_text_config(decoder=True)
    if handle:
        is_trained = handle.is_trained
        config = handle.model_config(model) if is_trained else handle.original_config
    rotaries, problem = _find_rotaries(model)
    path = str(getattr(full_config, "_name_or_path", "") or "")
    return Subject(
        config=config,
        model=model,
        live=True,
        rotaries=rotaries,
        problem=problem,
        handle=handle,
        path=path,
        display_name=display_name or path or "MODEL",
    )


def _from_path(path: str, gguf_file: str | None, display_name: str | None) -> Subject:
    adapter: dict[str, Any] = {}
    base, options = path, {} if gguf_file is None else {"gguf_file": gguf_file}
    if is_adapter(path):
        base, revision = adapter_base(path)
        options |= {} if revision is None else {"revision": revision}
        adapter = parse_json((Path(path) / ADAPTER_CONFIG).read_text())
    config = read_config(base, **options)
    return _without_weights(
        config,
        path=base,
        display_name=display_name or base,
        raw_config=_raw_config(base, config, options),
        sidecar=read_sidecar(path),
        adapter=adapter,
        adapter_path=path if adapter else "",
    )


def _without_weights(full_config: Any, *, path: str, **fields: Any) -> Subject:
    model: nn.Module | None = None
    rotaries: list[RotaryModule] = []
    is_loadable = True
    try:
        try:
            name = path or type(full_config).__name__
            model = empty_model(name, full_config, any_kind=True)
        except ValueError:  # a model that generates speech, for example
            with torch.device("meta"):
                model, is_loadable = (
                    AutoModel.from_config(copy.deepcopy(full_config), **trust_argument()),
                    False,
                )
        rotaries, problem = _find_rotaries(model)
    except Exception as error:  # an unchecked config can raise anything in a constructor
        problem = describe_error(error)
    config = full_config.get_text_config(decoder=True)
    return Subject(
        config=config,
        model=model,
        live=False,
        rotaries=rotaries,
        problem=problem,
        path=path,
        is_loadable=is_loadable,
        **fields,
    )


def _find_rotaries(model: nn.Module) -> tuple[list[RotaryModule], str | None]:
    try:
        return find_rotaries(model), None
    except Refused as error:
        return [], str(error)


def _raw_config(path: str, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of config.json, before transformers changes it."""
    if split_gguf(path, options.get("gguf_file"))[1] is not None:
        return {}
    try:
        raw_config, _ = PreTrainedConfig.get_config_dict(path, **options)
    except (OSError, ValueError, KeyError):
        return {}
    text = config.get_text_config(decoder=True)
    for name, value in raw_config.items():
        if isinstance(value, dict) and getattr(config, name, None) is text:
            return value
    return raw_config
