"""What is looked at: a live model, a config, a folder, a name on the Hub, an adapter's folder."""

from __future__ import annotations

import copy
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from rope_patch.patching import Patch, current
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_rotaries
from rope_patch.pretrained.adapters import adapter_base, is_adapter
from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.pretrained.saving import ADAPTER_CONFIG, read_sidecar
from rope_patch.utils.errors import describe_error, parse_json


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to look at, however it was given.

    Attributes:
        config: The decoder's config, as it is without a patch.
        model: The model; one without weights where a config was given; None where none can be made.
        live: Whether the model was given.
        rotaries: The model's rotary modules.
        problem: Why there is no model or no rotary module, or None.
        handle: The patch that stands on a live model, or None.
        raw_config: The decoder's part of config.json as it stands there; empty unless a path was
            given.
        sidecar: What `rope_patch.json` beside config.json or beside an adapter says, or None.
        adapter: What adapter_config.json says, where an adapter was given; else empty.
        adapter_path: Its folder.
        path: Where it was read from; what the live model was loaded from, as far as it says so.
        display_name: What to call it on a command line.
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

    def patch_call(self, method: str, arguments: str) -> str:
        """The Python that extends it."""
        rest = f'"{method}"' + (f", {arguments}" if arguments else "")
        if self.live or not self.path or not self.is_loadable:
            return f"rope_patch.patch(model, {rest})"
        return f"model = rope_patch.load({self.path!r}, {rest})"


def open_subject(
    model: Any, *, gguf_file: str | None = None, display_name: str | None = None
) -> Subject:
    """Finds out what was given, and reads what there is to read.

    Args:
        model: A model, a config, a folder, a name on the Hub, or an adapter's folder.
        gguf_file: The GGUF file within a folder.
        display_name: What to call it on a command line, where that is not its path.

    Raises:
        ValueError: No such model, or one that cannot be read.
        TypeError: None of these.
    """
    if isinstance(model, nn.Module):
        return _from_model(model, display_name)
    if isinstance(model, str | os.PathLike):
        return _from_path(os.fspath(model), gguf_file, display_name)
    if isinstance(model, PreTrainedConfig):
        path = str(getattr(model, "_name_or_path", "") or "")
        return _without_weights(model, path="", named=display_name or shlex.quote(path or "MODEL"))
    raise TypeError(
        "expected a transformers model, a config, a folder or a name on the Hub, got "
        f"{type(model).__name__}"
    )


def _from_model(model: nn.Module, named: str | None) -> Subject:
    handle = current(model)
    whole: Any = getattr(model, "config", None)
    if not isinstance(whole, PreTrainedConfig):
        raise ValueError(
            f"{type(model).__name__} has no transformers config: expected a transformers model"
        )
    config = handle.original_config if handle else whole.get_text_config(decoder=True)
    rotaries, problem = _find_rotaries(model)
    path = str(getattr(whole, "_name_or_path", "") or "")
    return Subject(
        config=config,
        model=model,
        live=True,
        rotaries=rotaries,
        problem=problem,
        handle=handle,
        path=path,
        display_name=named or shlex.quote(path or "MODEL"),
    )


def _from_path(path: str, gguf_file: str | None, named: str | None) -> Subject:
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
        named=named or shlex.quote(base),
        written=_raw_config(base, config, options),
        sidecar=read_sidecar(path),
        adapter=adapter,
        adapter_path=path if adapter else "",
    )


def _without_weights(whole: Any, *, path: str, **known: Any) -> Subject:
    model: nn.Module | None = None
    rotaries: list[RotaryModule] = []
    loads = True
    try:
        try:
            model = empty_model(path or type(whole).__name__, whole)
        except ValueError:  # not one that only generates text: with pictures, say
            with torch.device("meta"):
                model, loads = AutoModel.from_config(copy.deepcopy(whole)), False
        rotaries, problem = _find_rotaries(model)
    except Exception as error:  # whatever a config that nobody has checked makes of a constructor
        problem = describe_error(error)
    config = whole.get_text_config(decoder=True)
    return Subject(
        config=config,
        model=model,
        live=False,
        rotaries=rotaries,
        problem=problem,
        path=path,
        is_loadable=loads,
        **known,
    )


def _find_rotaries(model: nn.Module) -> tuple[list[RotaryModule], str | None]:
    try:
        return find_rotaries(model), None
    except ValueError as error:
        return [], str(error)


def _raw_config(path: str, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The decoder's part of config.json, before transformers makes anything of it."""
    if "gguf_file" in options:
        return {}
    try:
        said, _ = PreTrainedConfig.get_config_dict(path, **options)
    except (OSError, ValueError, KeyError):
        return {}
    text = config.get_text_config(decoder=True)
    for name, value in said.items():
        if isinstance(value, dict) and getattr(config, name, None) is text:
            return value
    return said
