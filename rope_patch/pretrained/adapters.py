"""PEFT adapters, which fit one rotation: the one that their base had when they were trained."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rope_patch.methods import Frequencies, build
from rope_patch.patching import Patch, check, current, patch
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.patching.architecture.rotary_modules import find_owner, find_rotaries
from rope_patch.patching.mla_scale import config_mscale, filter_by_layer_type, find_mla_attentions
from rope_patch.pretrained.saving import ADAPTER_CONFIG, SIDECAR, read_sidecar, request_from_sidecar
from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.utils.errors import parse_json

logger = logging.getLogger("rope_patch")


def require_same_rotation(
    model: nn.Module, folder: str | os.PathLike[str]
) -> dict[str, Any] | None:
    """Whether a base rotates as an adapter's did in training, or can be made to; changes nothing.

    Args:
        model: The base.
        folder: The adapter's.

    Returns:
        What to patch the base with, or None if it is right as it is.

    Raises:
        ValueError: It rotates otherwise.
    """
    sidecar = read_sidecar(folder)
    standing = current(model)
    if sidecar is None:
        if standing is not None:
            logger.warning(
                "%s has no %s, so nobody knows under which rotation the adapter was trained; its "
                "base is now patched: %s",
                folder,
                SIDECAR,
                describe_patch(standing),
            )
        return None
    if standing is None and _config_already_rotates_so(model, sidecar):
        return None
    request = request_from_sidecar(sidecar)
    trained_with = f"the adapter in {folder} was trained on a base that was patched with"
    try:
        wanted = Patch(check(model, **request))
    except (ValueError, TypeError) as error:
        said = ", ".join(f"{k}={v!r}" for k, v in request.items() if v is not None)
        raise ValueError(f"{trained_with} {said}, which this one cannot be: {error}") from error
    if not _matches_sidecar(wanted, sidecar):
        raise ValueError(
            f"{trained_with} {describe_patch(wanted)}, and that would rotate {type(model).__name__} "
            f"otherwise: the config of its base said {sidecar['original']}, that of this one says "
            f"{wanted.original}; load the base that the adapter was trained on"
        )
    if standing is None:
        return request
    if not _patches_equal(wanted, standing):
        raise ValueError(
            f"{trained_with} {describe_patch(wanted)}, got one that is patched with "
            f"{describe_patch(standing)}; rope_patch.unpatch(model) first, and load_adapter patches it "
            "as the adapter needs it"
        )
    return None


def describe_patch(handle: Patch) -> str:
    """A patch in one line: method, lengths, options, layer types and start."""
    options = {k: v for k, v in handle.method.options().items() if k != "factor" and v is not None}
    kinds = [str(kind) for kind in handle.geometries if kind is not None]
    started = any(geometry.base for geometry in handle.geometries.values())
    return "; ".join(
        [
            str(handle),
            *(
                f"{k}={f'[{len(v)} numbers]' if isinstance(v, list) else v}"
                for k, v in options.items()
            ),
            *([f"layers {', '.join(kinds)}"] if kinds else []),
            *(["start='running'"] if started else []),
        ]
    )


def _patches_equal(wanted: Patch, standing: Patch) -> bool:
    """Whether two patches of one model rotate sequences of all lengths alike."""
    if abs(wanted.softmax_mscale - standing.softmax_mscale) > 1e-6:
        return False
    if wanted.method.start_token_count != standing.method.start_token_count:
        return False
    lengths = {1.0}
    for handle in (wanted, standing):
        trained, target = handle.trained_length, handle.length or 4 * handle.trained_length
        lengths |= {trained, trained + 1, 1.5 * trained, target, 2 * target}
    # A layer type that one of them leaves alone rotates as the unpatched model does.
    own = wanted.original_frequencies | standing.original_frequencies
    for length in lengths:
        ours = own | wanted.frequencies_at(length)
        theirs = own | standing.frequencies_at(length)
        if not all(ours[kind].close_to(theirs[kind]) for kind in own):
            return False
    return True


def _sidecar_frequencies(sidecar: dict[str, Any]) -> dict[str | None, Frequencies]:
    try:
        return {
            None if kind == "all" else kind: Frequencies(
                torch.tensor(said["inv_freq"], dtype=torch.float64), said["attention_factor"]
            )
            for kind, said in sidecar["frequencies"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the frequencies in the adapter's {SIDECAR} are damaged ({error!r}): save it again"
        ) from error


def _matches_sidecar(wanted: Patch, sidecar: dict[str, Any]) -> bool:
    """Whether the recorded patch, put on this base, comes to the recorded frequencies."""
    recorded = _sidecar_frequencies(sidecar)
    return recorded.keys() == wanted.frequencies.keys() and all(
        frequencies.close_to(recorded[kind]) for kind, frequencies in wanted.frequencies.items()
    )


def _config_already_rotates_so(model: nn.Module, sidecar: dict[str, Any]) -> bool:
    """Whether the base's own config makes it rotate as the patch did: saved with it, say."""
    recorded = _sidecar_frequencies(sidecar)
    method = build(sidecar["method"], **sidecar["options"])
    if (
        not recorded
        or method.start_token_count
        or method.is_length_dependent(sidecar["trained_length"])
    ):
        return False
    rotaries = find_rotaries(model)
    config: Any = rotaries[0].module.config
    standing = by_layer_type(config.rope_parameters)
    for kind in recorded:
        own = standing.get(kind, {})
        switches = own.get("long_factor") != own.get("short_factor")
        if config_rope_type(own) == "dynamic" or switches:  # then no one set is all there is
            return False
    attentions = [a for rotary in rotaries for a in find_mla_attentions(find_owner(model, rotary))]
    for attention in filter_by_layer_type(attentions, config, recorded):
        if abs(config_mscale(attention, config) - sidecar.get("sharpening", 1.0)) > 1e-6:
            return False
    found = [reference_frequencies(rotary, config) for rotary in rotaries]
    return all(
        kind in rotates and rotates[kind].close_to(frequencies)
        for rotates in found
        for kind, frequencies in recorded.items()
    )


_WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def load_adapter(model: Any, folder: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Puts a saved PEFT adapter on its base, under the rotation that it was trained under.

    A base that is not patched is patched as the adapter's `rope_patch.json` records. One that
    rotates that way already, by a patch or by its own config, is taken as it is; what counts are
    the frequencies, not the words. An adapter without that file is put on with a warning if the
    base is patched, as nobody knows whether it should be.

    Args:
        model: The base, or a PEFT model that gets another adapter.
        folder: What `rope_patch.save` or PEFT wrote.
        **kwargs: What `peft.PeftModel.from_pretrained` takes: `is_trainable`, `adapter_name`, ...

    Returns:
        The PEFT model.

    Raises:
        ValueError: No adapter, a damaged one, one of another model, or one that was trained under
            another rotation: says both. The base is as before.
    """
    current(model)  # raises for what is no model
    require_adapter(folder)
    peft = _import_peft()
    is_peft = isinstance(model, peft.PeftModel)
    name = kwargs.setdefault("adapter_name", "default")
    if is_peft and name in model.peft_config:
        raise ValueError(
            f"expected a new name for the adapter in {folder}, got {name!r}, which the model has "
            f"already ({', '.join(model.peft_config)}); pass adapter_name=..."
        )
    request = require_same_rotation(model, folder)
    base = model.get_base_model() if is_peft else model
    _require_matching_model(peft, base, folder)
    handle = patch(model, **request) if request else None
    try:
        if places := _peft_device_map(peft, base, folder):
            kwargs.setdefault("device_map", places)
        if is_peft:
            model.load_adapter(os.fspath(folder), **kwargs)
            return model
        return peft.PeftModel.from_pretrained(model, os.fspath(folder), **kwargs)
    except BaseException:
        if handle is not None:
            handle.undo()
        raise


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder with an adapter, and no whole model beside it."""
    folder = Path(path)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def require_adapter(path: str | os.PathLike[str]) -> None:
    """Refuses what is no folder with a whole adapter in it."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"no such folder: {path}; expected one with an adapter. An adapter on the Hub is to be "
            "fetched first: huggingface_hub.snapshot_download(name) returns its folder"
        )
    there = sorted(p.name for p in folder.iterdir())
    weights = [name for name in _WEIGHTS_FILES if name in there]
    for needed, found in (
        (ADAPTER_CONFIG, ADAPTER_CONFIG in there),
        (_WEIGHTS_FILES[0], bool(weights)),
    ):
        if not found:
            raise ValueError(
                f"{path} holds no {needed}: expected a folder that rope_patch.save or PEFT wrote, "
                f"found {', '.join(there[:5]) or 'nothing'}"
            )
    if weights[0] == _WEIGHTS_FILES[0]:
        try:
            with safe_open(folder / weights[0], "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{folder / weights[0]} is cut short or damaged ({error}); save the adapter again"
            ) from error


def adapter_base(folder: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The model that an adapter was trained on: its path or name on the Hub, and its revision.

    Raises:
        ValueError: The adapter does not say, or is damaged.
    """
    require_adapter(folder)
    path = Path(folder) / ADAPTER_CONFIG
    try:
        said = parse_json(path.read_text())
        base, revision = said.get("base_model_name_or_path"), said.get("revision")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): save the adapter again") from error
    base = base or (read_sidecar(folder) or {}).get("base_model")
    if not base or not isinstance(base, str):
        raise ValueError(
            f"{path} does not say on which model the adapter was trained: expected "
            f"base_model_name_or_path, got {base!r}; load the base yourself, and call "
            f"rope_patch.load_adapter(model, {str(folder)!r})"
        )
    return base, revision


def _require_matching_model(peft: Any, base: Any, folder: str | os.PathLike[str]) -> None:
    """Tries the adapter on an empty model first: PEFT changes a model before it finds out."""
    try:
        with torch.device("meta"):
            empty = type(base)(copy.deepcopy(base.config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to say comes again in earnest
            peft.PeftModel.from_pretrained(empty, os.fspath(folder))
    except Exception as error:  # what this cannot try is left to PEFT
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "size mismatch" in line), lines[0] if lines else "")
        if "size mismatch" in said or "Target modules" in said:
            raise ValueError(
                f"the adapter in {folder} does not fit {type(base).__name__}: {said}; expected the "
                f"model that it was trained on, {adapter_base(folder)[0]!r}"
            ) from error


def _peft_device_map(peft: Any, base: Any, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Where the parts of an offloaded base lie, by PEFT's names: it would place them anew."""
    places = getattr(base, "hf_device_map", None) or {}
    if not {"cpu", "disk"} & set(places.values()):
        return None
    if peft.PeftConfig.from_pretrained(os.fspath(folder)).is_prompt_learning:
        return None
    return {f"base_model.model.{name}".rstrip("."): place for name, place in places.items()}


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which adapters need: pip install 'rope-patch[train]'"
        ) from error
    return peft
