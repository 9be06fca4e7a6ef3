"""The record that weights were trained under a rotation, in configs, sidecars and adapters.

Whatever trains calls `mark_trained`. The record is in the live config from then on, so every way to
save the model writes it: this package, transformers, a trainer's checkpoints, a merged adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.original_config import (
    FIELD,
    ORIGINAL,
    TRAINED,
    is_saved_patch,
    original_config,
    saved_field,
    trained_rotation,
)
from rope_patch.patching import Patch
from rope_patch.patching.active import current
from rope_patch.pretrained.encoding_checkpoint import is_encoding_sidecar
from rope_patch.pretrained.sidecar import (
    SIDECAR,
    extension_from_sidecar,
    read_sidecar,
    sidecar_target,
)
from rope_patch.pretrained.transformers_registry import to_native_rope_parameters
from rope_patch.utils.errors import Refused

_CARD = "Made by `rope-patch finetune"  # in the cards of `finetune`


def mark_trained(model: nn.Module) -> None:
    """Record that a model's weights were trained under the rotation that it has now.

    Undoing the patch leaves the record: the weights stay trained.

    Args:
        model: The model, in whatever wrappers; patched, or as transformers loaded it from a folder
            that was saved with a patch. Others need no record, because their config says it all.
    """
    handle = current(model)
    if isinstance(handle, Patch):
        if not handle.is_trained:
            handle.is_trained = True
            _write(model, type(handle.original_config), patch_field(handle, model))
    elif handle is None:
        for text in _text_configs(model, PreTrainedConfig):
            _mark_saved(text)


def mark_trained_as(model: nn.Module, sidecar: dict[str, Any]) -> None:
    """Record that a model's weights were trained under the rotation that a sidecar records.

    Args:
        model: A model that rotates so.
        sidecar: The sidecar of the model, or of an adapter in it; nothing if it was not trained.
    """
    if not sidecar.get(TRAINED):
        return
    if current(model) is not None:
        mark_trained(model)
    elif isinstance(sidecar[TRAINED], dict):  # a base whose own config has the rotation
        field = saved_field(sidecar["original"], sidecar[TRAINED])
        _write(model, PreTrainedConfig, field)


def adapter_start(model: nn.Module, sidecar: dict[str, Any]) -> contextlib.ExitStack:
    """Give a base the record of the rotation that an adapter's patch starts from.

    An adapter may have been trained under one patch and saved under a further one. The base of both
    knows of neither, so the sidecar says what the further one continues.

    Args:
        model: The base; a patched one, or one with a record of its own, is left alone.
        sidecar: The adapter's.

    Returns:
        A stack that takes the record away when it ends; its `pop_all` keeps the record.
    """
    stack, field = contextlib.ExitStack(), sidecar["original"].get(FIELD)
    if field is not None and current(model) is None:
        for text in _text_configs(model, PreTrainedConfig):
            if not is_saved_patch(text):
                setattr(text, FIELD, field)
                stack.callback(delattr, text, FIELD)
    return stack


def patch_field(handle: Patch, model: nn.Module) -> dict[str, Any]:
    """Return the record of a patch for its model's config: what was before it, and if it trained.

    Args:
        handle: The patch in effect.
        model: Its model.
    """
    native = to_native_rope_parameters(handle.original_config)
    before = {**handle.original, "rope_parameters": native}
    return saved_field(before, trained_part(handle, model))


def trained_part(handle: Patch, model: nn.Module) -> dict[str, Any] | bool:
    """Return the rotation that a patched model was trained under; False if it was not."""
    if not handle.is_trained:
        return False
    if handle.is_in_config:
        text = next(_text_configs(model, type(handle.original_config)))
        return trained_rotation(text.max_position_embeddings, to_native_rope_parameters(text))
    extension = handle.extension
    request = {"factor": extension.factor, "options": dict(extension.options)}
    return trained_rotation(handle.length, None, method=extension.method, **request)


def recorded_field(folder: Path, text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a folder's text config, completed by what lies beside it.

    The field is missing in folders of rope_patch 0.1, and says nothing of training in those of
    later releases before the record. Of these, `finetune` wrote a card that says so.

    Args:
        folder: The model's folder.
        text: The fields of its text config.

    Returns:
        The value of `FIELD`; None if the folder was saved without a patch.

    Raises:
        ValueError: The config and the sidecar disagree; names both lengths.
    """
    field: Any = text.get(FIELD)
    sidecar = read_sidecar(folder) if folder.is_dir() else None
    if sidecar is None or is_encoding_sidecar(sidecar):
        return field
    if field is None:
        field = {ORIGINAL: sidecar["original"]}
    if not isinstance(field, dict):
        return field  # damaged, which whoever reads it says
    if TRAINED in sidecar:
        lengths = [_describe(record) for record in (field.get(TRAINED), sidecar[TRAINED])]
        if TRAINED in field and lengths[0] != lengths[1]:
            raise Refused(
                f"{folder}: config.json says that the model was {lengths[0]}, and {SIDECAR} that "
                f"it was {lengths[1]}, under the patch that it was saved with: save the model "
                "again, or delete the wrong file's field 'trained'"
            )
        return {**field, TRAINED: sidecar[TRAINED]}
    if TRAINED not in field and _is_finetuned(folder):
        return {**field, TRAINED: _earlier_record(sidecar, text)}
    return field


def _describe(record: Any) -> str:
    if not record:
        return "not trained"
    length = record["max_position_embeddings"] if isinstance(record, dict) else None
    return "trained" if length is None else f"trained for {length:,} tokens"


def _is_finetuned(folder: Path) -> bool:
    """Return whether an earlier release's `finetune` wrote a folder, by its card."""
    card = folder / "README.md"
    return card.is_file() and _CARD in card.read_text(encoding="utf-8", errors="replace")


def _earlier_record(sidecar: dict[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that an earlier release did not write of a model that it trained."""
    if sidecar.get("native"):
        return trained_rotation(text["max_position_embeddings"], text["rope_parameters"])
    extension = extension_from_sidecar(sidecar)
    request = {"factor": extension.factor, "options": dict(extension.options)}
    return trained_rotation(sidecar_target(sidecar), None, method=extension.method, **request)


def _mark_saved(text: Any) -> None:
    """Record of a config that was saved with a patch that its model was trained under it."""
    if not is_saved_patch(text) or not getattr(text, "rope_parameters", None):
        return
    rotation = original_config(text, trained_length=text.max_position_embeddings)
    if rotation.rope_parameters == text.rope_parameters:
        setattr(text, FIELD, getattr(rotation, FIELD, None))


def _text_configs(model: nn.Module, kind: type) -> Iterator[Any]:
    """Yield the text configs of a kind that a model's modules hold, each once."""
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        if not isinstance(config, PreTrainedConfig):
            continue
        text = config.get_text_config(decoder=True)
        if isinstance(text, kind) and id(text) not in seen:
            seen.add(id(text))
            yield text


def _write(model: nn.Module, kind: type, field: dict[str, Any]) -> None:
    for text in _text_configs(model, kind):
        if getattr(text, "rope_parameters", None):
            setattr(text, FIELD, field)
