"""A `save_pretrained` that writes the rotation beside whatever a trainer saves."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.patching.active import current
from rope_patch.patching.encodings.handle import EncodingPatch
from rope_patch.patching.handle import Patch
from rope_patch.pretrained.saving import ADAPTER_CONFIG, record_adapters, record_patch
from rope_patch.pretrained.sidecar import SIDECAR

logger = logging.getLogger("rope_patch")

_METHOD = "save_pretrained"


class SaveHook:
    """The `save_pretrained` of one model, which also writes the patch that is in effect.

    A trainer saves checkpoints and the finished model by this method. The folder then is what
    `rope_patch.save` makes: a config that states the rotation, and the sidecar; for an adapter the
    sidecar alone.
    """

    def __init__(self, original_method: Any, model: Any) -> None:
        self.original_method = original_method
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.original_method(save_directory, *args, **kwargs)
        handle = current(self.model)
        # Only one process writes.
        if handle is None or not kwargs.get("is_main_process", args[0] if args else True):
            return result
        folder = Path(save_directory)
        adapters = list(_adapter_folders(folder, self.model))
        if adapters:
            record_adapters([folder, *adapters], self.model, handle)
        elif (folder / "config.json").is_file():
            record_patch(folder, self.model, handle)
        if kwargs.get("push_to_hub"):
            logger.warning(
                "save_pretrained(push_to_hub=True) uploads before %s is written: push afterwards, "
                "with model.push_to_hub(name)",
                SIDECAR,
            )
        return result


def install_save_hooks(model: nn.Module, handle: Patch | EncodingPatch) -> None:
    """Have a model, and the base within PEFT's wrapper, write their patch when they are saved.

    Args:
        model: The model, or anything around it.
        handle: Its patch; the hooks end with it.
    """
    for owner in _saved_models(model):
        if not isinstance(vars(owner).get(_METHOD), SaveHook):
            handle.undo_log.set(owner, _METHOD, SaveHook(owner.save_pretrained, owner))


def copy_sidecar(source: Path, target: Path) -> None:
    """Copy the sidecar of the newest checkpoint in a run's folder, if there is one, to a folder."""
    checkpoints = sorted(source.glob(f"checkpoint-*/{SIDECAR}"), key=lambda p: p.stat().st_mtime)
    if checkpoints:
        sidecar = json.loads(checkpoints[-1].read_text())
        (target / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")


def _saved_models(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost model that can be saved, and the base within PEFT's wrapper."""
    outer: Any = next((m for m in model.modules() if hasattr(type(m), _METHOD)), None)
    if outer is None:
        return
    yield outer
    if hasattr(outer, "peft_config") and hasattr(outer, "get_base_model"):
        yield outer.get_base_model()


def _adapter_folders(folder: Path, model: Any) -> Iterator[Path]:
    """Yield the folders in which PEFT has just written a model's adapters."""
    if not hasattr(model, "peft_config"):
        return
    for path in (folder, *(folder / name for name in model.peft_config)):
        if (path / ADAPTER_CONFIG).is_file():
            yield path
