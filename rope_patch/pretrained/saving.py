"""Saving of a patched model in a form that transformers and this package can load."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig

from rope_patch.encodings.active import current
from rope_patch.encodings.replacement.entry_point import EncodedModel, current_encode
from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.original_config import FIELD
from rope_patch.patching import Patch
from rope_patch.patching.architecture.mla_scale import config_mscale
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.architecture.rotary_traits import reference_frequencies
from rope_patch.patching.method_wrappers import unwrap
from rope_patch.pretrained.encoding_checkpoint import TABLES, record_encoding, write_encoded
from rope_patch.pretrained.sidecar import SIDECAR, make_sidecar, patch_field, trained_part
from rope_patch.pretrained.transformers_registry import to_native_rope_parameters
from rope_patch.transformers_api.remote_code import code_identity
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused, describe_error, parse_json
from rope_patch.utils.installation import version

logger = logging.getLogger("rope_patch")

# Errors of transformers for a config that it cannot read.
_CONFIG_ERRORS = (KeyError, ValueError, TypeError, AttributeError)
ADAPTER_CONFIG = "adapter_config.json"
_DISK_ADVICE = "What was in the folder before is still there: REMEDY, and save again"

OTHER_GROWTH = (
    " as it grows here: its own dynamic grows with every token, and equals growth='exact' alone"
)


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> None:
    """Write a patched model: safetensors, a native config, and the sidecar `rope_patch.json`.

    If the method has a native form, plain transformers loads the folder to the same logits, up to
    float32 rounding (it computes frequencies in float32). If it has none, a warning says so, and
    the sidecar's `native` is false. Dynamic methods other than `dynamic` have none: plain
    transformers then loads the unpatched model. Its own `dynamic` grows with every token and keeps
    stale cached keys. So it equals ours in one pass with growth="exact" alone, which is native, and
    never beyond the trained length with a cache.

    An interrupted save leaves the folder's previous content in place.

    For a PEFT model the adapter is written with the sidecar beside it, so that `load` and
    `load_adapter` know the rotation it was trained under.

    Args:
        model: A patched model, or one that `rope_patch.encode` changed.
        folder: Target folder; created if missing.
        tokenizer: The model's tokenizer, to be written, too; its `model_max_length` is raised to
            the patch's length.
        overwrite: Whether to save into the folder that the model came from, whose weights and
            config are then replaced.

    Raises:
        ValueError: The model is not patched, the folder is a file or the one that the model came
            from, or an adapter would lie beside a whole model.
        OSError: Writing failed; says where and how to continue.
    """
    if (encoded := current_encode(model)) is not None:
        _save_encoded(model, encoded, _require_folder(folder, model, overwrite), tokenizer)
        return
    handle = current(model)
    if handle is None:
        raise Refused(
            f"{type(model).__name__} is not patched: expected a model that rope_patch.patch or "
            "rope_patch.load returned; use model.save_pretrained for others"
        )
    folder = _require_folder(folder, model, overwrite)
    with atomic_files.explain_write_errors(folder.parent, folder.name, _DISK_ADVICE):
        adapters, native, problem = _write_folder(model, handle, folder, tokenizer)
    if adapters:
        logger.info(
            "%s: an adapter for a base patched with %s; load it with rope_patch.load or "
            "rope_patch.load_adapter, as PEFT alone patches nothing",
            folder,
            handle,
        )
    elif problem and isinstance(handle, Patch):
        logger.warning(
            "%s: plain transformers %s cannot load this folder at all (%s), and neither can "
            "releases before it; load it with rope_patch.load%s",
            folder,
            version("transformers"),
            problem,
            _release_hint(handle),
        )
    elif not native:
        logger.warning(
            "%s: transformers %s has no form of its own for %s%s; load this folder with "
            "rope_patch.load",
            folder,
            version("transformers"),
            handle.method,
            OTHER_GROWTH if isinstance(handle, Patch) and handle.method.name == "dynamic" else "",
        )


def _require_folder(folder: str | os.PathLike[str], model: Any, overwrite: bool) -> Path:
    """Return a folder to save into; raise if it is a file, or the model's source."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is a file: expected a folder to save into")
    source = getattr(model.config, "_name_or_path", "")
    is_source = source and folder.exists() and Path(source).exists() and folder.samefile(source)
    if is_source and not overwrite:
        raise Refused(
            f"{folder} is the folder that the model came from: expected another one, as its "
            "weights and config would be replaced; if that is meant, pass overwrite=True"
        )
    return folder


def _write_folder(
    model: nn.Module, handle: Patch | EncodingPatch, folder: Path, tokenizer: Any
) -> tuple[list[Path], bool, str | None]:
    """Write a patched model; return its adapters' folders, and what `record_patch` returns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        staging = Path(temporary)
        model.save_pretrained(staging)  # type: ignore[operator]
        adapters = [path.parent for path in staging.rglob(ADAPTER_CONFIG)]
        _refuse_adapter_beside_model(folder, adapters)
        if adapters:
            native, problem = False, None
            record_adapters({staging, *adapters}, model, handle)
        else:
            native, problem = record_patch(staging, model, handle)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
            raise_tokenizer_length(staging, handle)
        _replace_files(staging, folder)
    return adapters, native, problem


def _save_encoded(model: nn.Module, handle: EncodedModel, folder: Path, tokenizer: Any) -> None:
    """Write a model that `rope_patch.encode` changed, and move it into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _refuse_adapter_beside_model(folder, [])
    with (
        atomic_files.explain_write_errors(folder.parent, folder.name, _DISK_ADVICE),
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary,
    ):
        write_encoded(model, handle, Path(temporary))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
            if (extended := current(model)) is not None:
                raise_tokenizer_length(Path(temporary), extended)
        _replace_files(Path(temporary), folder)
    if not handle.encoding.is_in_config:
        logger.warning(
            "%s: plain transformers loads this folder without the encoding %r; load it with "
            "rope_patch.load",
            folder,
            handle.name,
        )


def record_patch(
    folder: Path, model: nn.Module, handle: Patch | EncodingPatch
) -> tuple[bool, str | None]:
    """Complete the config of a patched model in a folder, and write the sidecar beside it.

    Args:
        folder: Holds the `config.json` that transformers wrote for the patched model.
        model: The model; its weights may be on the meta device.
        handle: Its patch.

    Returns:
        Whether plain transformers loads the model to the same logits, and why it cannot load it at
        all, if so.
    """
    if isinstance(handle, EncodingPatch):
        sidecar = record_encoding(folder, handle)
        (folder / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")
        return sidecar["native"], None
    _complete_config(folder / "config.json", model, handle)
    problem = _loading_problem(folder, model)
    native = not problem and _loads_natively(folder, model, handle)
    sidecar = make_sidecar(handle, native, trained_part(handle, model))
    (folder / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")
    return native, problem


def record_adapters(
    folders: Iterable[Path], model: nn.Module, handle: Patch | EncodingPatch
) -> None:
    """Write the sidecar of the base's patch beside adapters, and a line into their README.

    Args:
        folders: The adapters' folders, and the one around them.
        model: The PEFT model.
        handle: The patch of its base.
    """
    trained = isinstance(handle, Patch) and trained_part(handle, model)
    sidecar = make_sidecar(handle, False, trained)
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    sidecar["base_model"] = getattr(text, "name_or_path", None) or None
    line = (
        f"Trained under the rotation of {handle}: load with `rope_patch.load`, as plain PEFT "
        "rotates otherwise."
    )
    for folder in folders:
        (folder / SIDECAR).write_text(json.dumps(sidecar, indent=2) + "\n")
        # PEFT writes one README around several adapters, and keeps the text of one that is there.
        readme = folder / "README.md"
        if readme.is_file() or (folder / ADAPTER_CONFIG).is_file():
            text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
            if line not in text:
                readme.write_text(f"{text}\n{line}\n".lstrip(), encoding="utf-8")


def raise_tokenizer_length(folder: Path, handle: Patch | EncodingPatch) -> None:
    """Raise `model_max_length` of a tokenizer in a folder to the length of a patch.

    Serving engines take the smaller of the tokenizer's and the model's, and tokenizers warn beyond
    their own.
    """
    path = folder / "tokenizer_config.json"
    if handle.length is None or not path.is_file():
        return
    config = parse_json(path.read_text(encoding="utf-8"))
    length = config.get("model_max_length")
    if isinstance(length, int | float) and length < handle.length:
        config["model_max_length"] = handle.length
        # Replaced and not changed, because it may be a link to the checkpoint's file.
        path.unlink()
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _saved_config(folder: Path, model: nn.Module) -> Any:
    """Return a saved folder's config; by its class, where its code came with the checkpoint."""
    # `AutoConfig` would execute the code that was saved, which the live model has executed.
    live: Any = model.config
    return (type(live) if code_identity(model) else AutoConfig).from_pretrained(folder)


def _loads_natively(folder: Path, model: nn.Module, handle: Patch) -> bool:
    """Return whether transformers, from the folder alone, rotates as the patched model does."""
    if not (handle.method.is_native and unwrap(handle.method).is_native):
        return False
    try:
        config = _saved_config(folder, model).get_text_config(decoder=True)
        for rotary in find_rotaries(model):
            for layer_type, plain in reference_frequencies(rotary, config).items():
                if layer_type not in handle.geometries:
                    continue
                # A module's initial frequencies: the short ones, if the method depends on the
                # length.
                geometry = handle.geometries[layer_type]
                ours = handle.method.frequencies_at(geometry, 1)
                if not ours.close_to(plain):
                    return False
        for attention in handle.mla_attentions:
            if abs(config_mscale(attention, config) - handle.softmax_mscale) > 1e-6:
                return False
    except _CONFIG_ERRORS:
        return False
    return True


def _loading_problem(folder: Path, model: nn.Module) -> str | None:
    """Return why the installed transformers cannot load a folder by itself, or None if it can."""
    try:
        config = _saved_config(folder, model).get_text_config(decoder=True)
        for rotary in find_rotaries(model):
            reference_frequencies(rotary, config)
    except (*_CONFIG_ERRORS, OSError, StrictDataclassError) as error:
        return describe_error(error.__cause__ or error)
    return None


def _release_hint(handle: Patch) -> str:
    """Return a hint at the first release of transformers that reads a patch, if known."""
    if handle.method.rope_parameters(next(iter(handle.geometries.values())))["rope_type"] == (
        "proportional"
    ):
        return ", or with transformers 5.5 or later"
    by_layer_type = None not in handle.geometries
    return ", or with transformers 5.9 or later" if by_layer_type else ""


def _complete_config(path: Path, model: nn.Module, handle: Patch) -> None:
    """Write the record of the patch, and transformers' names for our rope types, to config.json."""
    config = parse_json(path.read_text())
    text = config.get("text_config", config)
    text[FIELD] = patch_field(handle, model)
    live_config: Any = model.config
    live = live_config.get_text_config(decoder=True)
    native = to_native_rope_parameters(live)
    if native != live.rope_parameters:
        text["rope_parameters"] = native
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _refuse_adapter_beside_model(folder: Path, adapters: list[Path]) -> None:
    """Raise if an adapter and a whole model would share a folder."""
    other_file, content = (
        ("config.json", "an adapter") if adapters else (ADAPTER_CONFIG, "a whole model")
    )
    if (folder / other_file).is_file():
        raise Refused(
            f"{folder} holds {other_file}: expected another folder for {content}, as transformers "
            "would load both together from this one"
        )


def _replace_files(staging: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    new = {path.name for path in staging.iterdir()}
    # Weights first, because JSON files that describe them must not appear before them.
    for path in sorted(staging.iterdir(), key=lambda path: path.suffix == ".json"):
        if path.is_dir():
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    # transformers would prefer an earlier save's weights to the new shards.
    for stale in [*folder.glob("model*.safetensors*"), *folder.glob(TABLES)]:
        if stale.name not in new:
            stale.unlink()
