"""Record a patch beside a model or an adapter (`rope_patch.json`), and read and compare records.

Two records need more than the request. A method that is not ours may be missing where a folder is
loaded, or compute other numbers there, so its recorded frequencies are the truth. And a model may
have been trained under its rotation, which its config says, too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_patch.encodings.active import current
from rope_patch.encodings.sites.handle import EncodingPatch
from rope_patch.extension import Extension
from rope_patch.methods import Frequencies
from rope_patch.methods.base import Rotation
from rope_patch.methods.origin import Origin
from rope_patch.methods.recorded import Recorded
from rope_patch.methods.registry import find_method
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
from rope_patch.patching.architecture.mla_scale import (
    config_mscale,
    filter_by_layer_type,
    find_mla_attentions,
)
from rope_patch.patching.architecture.rotary_modules import find_owner, find_rotaries
from rope_patch.patching.architecture.rotary_traits import reference_frequencies
from rope_patch.patching.method_wrappers import method_origin
from rope_patch.patching.plan import PatchPlan
from rope_patch.pretrained.encoding_checkpoint import (
    KIND,
    SIDECAR,
    encoding_sidecar,
    is_encoding_sidecar,
)
from rope_patch.pretrained.transformers_registry import to_native_rope_parameters
from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.utils.errors import Refused, parse_json
from rope_patch.utils.installation import version

logger = logging.getLogger("rope_patch")

OUTSIDE = "outside"  # the field about a method that is not ours
_TYPES: dict[str, Any] = {
    "method": str,
    "options": dict,
    "original": dict,
    "trained_length": int | None,
    "layer_types": list | None,
}
_NEW_TYPES: dict[str, Any] = {  # rope_patch 0.1 has the factor among the options
    "factor": float | int | None,
    "length": int | None,
    "start": str,
    OUTSIDE: dict,  # methods that are not ours
    TRAINED: dict | bool,
}
# Begins a sentence in the model cards that `finetune` writes.
_CARD = "Made by `rope-patch finetune"


def read_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the sidecar `rope_patch.json` of a folder; None if there is none.

    Raises:
        ValueError: The file is damaged, or of an encoded model.
    """
    path = Path(folder) / SIDECAR
    if not path.is_file():
        return None
    try:
        sidecar = dict(parse_json(path.read_text()))
        if sidecar.get("kind") != KIND:
            _require_fields(sidecar)
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}): save the model again") from error
    if sidecar.get("kind") == KIND:
        raise Refused(
            f"{folder} holds a model with another encoding (rope_patch.encode), which only "
            "rope_patch.load reads: expected a model with the encoding of its class; call the "
            "function of rope_patch with the model that load returns, where it takes one"
        )
    return sidecar


def _require_fields(sidecar: dict[str, Any]) -> None:
    """Raise unless a sidecar has all its fields, of their types."""
    if missing := _TYPES.keys() - sidecar.keys():
        raise Refused(f"no {', '.join(sorted(missing))}")
    for key, expected_type in (_TYPES | _NEW_TYPES).items():
        if key in sidecar and not isinstance(sidecar[key], expected_type):
            raise Refused(f"{key} is {sidecar[key]!r:.60}")
    if "factor" not in {*sidecar, *sidecar["options"]}:
        raise Refused("no factor among its options")


def patch_to_restore(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read the sidecar of a folder whose patch only `load` restores or takes off; else None.

    A folder whose weights were trained under the rotation that its config states is a checkpoint
    like any other: transformers loads it as it was trained, and extensions start from there.

    Raises:
        ValueError: See `read_sidecar`.
    """
    sidecar = read_sidecar(folder)
    trained = {} if sidecar is None else sidecar.get(TRAINED)
    if isinstance(trained, dict) and trained.get("rope_parameters"):
        return None
    return sidecar


def extension_from_sidecar(sidecar: dict[str, Any]) -> Extension:
    """Return the request that restores the patch of a sidecar.

    That is by its recorded frequencies, with a warning, if the method is not ours and not known
    here.

    Raises:
        ValueError: The recorded frequencies are not all that such a method did.
    """
    if is_missing(sidecar):
        return recorded_extension(sidecar)
    request = {f.name: sidecar[f.name] for f in fields(Extension) if f.name in sidecar}
    if "factor" not in request:  # rope_patch 0.1 wrote the length that the factor led to
        options = dict(sidecar["options"])
        factor, length = options.pop("factor"), request.pop("length", None)
        method_class = find_method(sidecar["method"])
        if method_class is not None and method_class.is_dynamic:
            request["length"] = length
            factor = factor if method_class.factor_is_option else None
        if sidecar["method"] == "nope":  # 0.1 scaled cos and sin by the length of the whole text
            options.pop("growth", None)
            if coefficient := options.pop("temperature", 0):
                options["temperature"] = f"drope:{coefficient}"
        request |= {"factor": factor, "options": options}
    # Whoever saved the patch meant its length, also before requests had to say so.
    return Extension(**request | {"anyway": True})


def sidecar_target(sidecar: dict[str, Any]) -> int | None:
    """Return the target length of a sidecar's patch in tokens, or None if it has none."""
    return sidecar.get("target_length", sidecar.get("length"))


def sidecar_frequencies(sidecar: dict[str, Any]) -> dict[str | None, Frequencies]:
    """Return the frequencies of each layer type that a sidecar records.

    Raises:
        ValueError: They are damaged.
    """
    try:
        return {
            None if layer_type == "all" else layer_type: Frequencies(
                torch.tensor(entry["inv_freq"], dtype=torch.float64), entry["attention_factor"]
            )
            for layer_type, entry in sidecar["frequencies"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"the frequencies in rope_patch.json are damaged ({error!r}): save it again"
        ) from error


def make_sidecar(
    handle: Patch | EncodingPatch, native: bool, trained: dict[str, Any] | bool = False
) -> dict[str, Any]:
    """Return the sidecar of a patched model.

    Args:
        handle: The patch.
        native: Whether plain transformers loads the folder to the same logits.
        trained: The rotation that the weights were trained under (`trained_part`); False if they
            were not.
    """
    if isinstance(handle, EncodingPatch):
        return encoding_sidecar(handle, native)
    # The kernels are for the machine at hand, not for the one that loads the folder.
    extension = replace(handle.extension, kernels="auto")
    return {
        "rope_patch": version("rope-patch"),
        "transformers": version("transformers"),
        **extension.to_dict(),
        "target_length": handle.length,
        "sharpening": handle.softmax_mscale,
        "native": native,
        **outside_record(handle),
        "original": handle.original,
        TRAINED: trained,
        "frequencies": {
            layer_type or "all": {
                "inv_freq": frequencies.inv_freq.tolist(),
                "attention_factor": frequencies.attention_factor,
            }
            for layer_type, frequencies in handle.frequencies.items()
        },
    }


# -- methods that are not ours ---------------------------------------------------------------------


def outside_record(handle: Patch) -> dict[str, Any]:
    """Return what a sidecar says under `OUTSIDE` of a method that is not ours; else nothing."""
    origin = method_origin(handle.method)
    if not isinstance(origin, Origin):  # ours, or recorded already
        return {}
    record = {
        **origin.to_dict(),
        "follows_length": handle.is_length_dependent,
        "start_tokens": handle.method.start_token_count,
    }
    return {OUTSIDE: record}


def describe_outside(sidecar: dict[str, Any]) -> str:
    """Return where a sidecar's method was from; empty for ours."""
    if sidecar["method"] == Recorded.name:
        return str(sidecar["options"].get("origin", ""))
    names = ("package", "version", "file", "digest")
    record = sidecar.get(OUTSIDE)
    return "" if record is None else str(Origin(*(record.get(name) for name in names)))


def is_missing(sidecar: dict[str, Any]) -> bool:
    """Return whether a sidecar's method came from outside and is not known here."""
    return OUTSIDE in sidecar and find_method(sidecar["method"]) is None


def recorded_extension(sidecar: dict[str, Any]) -> Extension:
    """Return the request that restores a sidecar's patch from its recorded frequencies.

    Raises:
        ValueError: They are not all that the method did.
    """
    method, record, origin = sidecar["method"], sidecar[OUTSIDE], describe_outside(sidecar)
    try:
        follows_length, start_tokens = record["follows_length"], record["start_tokens"]
        if type(start_tokens) is not int or start_tokens < 0:
            raise ValueError(f"start_tokens must be a whole number from 0 on, got {start_tokens!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"rope_patch.json is damaged ({OUTSIDE}: {error!r}): save the model again"
        ) from error
    if follows_length or (start_tokens and sidecar["start"] == "running"):
        why = "follows the length" if follows_length else "keeps a rotation for its first tokens"
        raise Refused(
            f"the model was saved with {method!r} of {origin}, which is not loaded here and {why}, "
            "so that the recorded frequencies are not all of it: install the package, or import "
            "the file first (rope_patch.methods.load_plugin, or --plugin)"
        )
    logger.warning(
        "%r of %s is not loaded here: the model rotates by the frequencies that rope_patch.json "
        "records",
        method,
        origin,
    )
    # In latent attention, the attention factor is in the softmax scale.
    in_softmax = sidecar.get("sharpening", 1.0)
    layers = {
        layer_type or "all": {
            "inv_freq": frequencies.inv_freq.tolist(),
            "attention_factor": in_softmax if in_softmax != 1 else frequencies.attention_factor,
        }
        for layer_type, frequencies in sidecar_frequencies(sidecar).items()
    }
    return Extension(
        Recorded.name,
        factor=sidecar["factor"],
        length=sidecar["length"],
        trained_length=sidecar["trained_length"],
        layer_types=sidecar["layer_types"],
        start="unscaled",  # the recorded numbers need nothing to start from
        anyway=True,  # whoever saved the patch meant its length
        options={
            "saved_method": method,
            "origin": origin,
            "layers": layers,
            "start_tokens": start_tokens,
        },
    )


def require_recorded(plan: PatchPlan, sidecar: dict[str, Any]) -> None:
    """Raise if a method from outside computes other numbers than when the folder was saved.

    Raises:
        ValueError: It does, at the target length.
    """
    if OUTSIDE not in sidecar:
        return
    recorded = Rotation(sidecar_frequencies(sidecar), sidecar.get("sharpening", 1.0))
    if recorded.close_to(Rotation(plan.frequencies(), plan.softmax_mscale)):
        return
    raise Refused(
        f"{plan.method.name!r} computes other frequencies here than {sidecar['method']!r} did when "
        "the model was saved, which rope_patch.json records: load it with the method as it was, or "
        "without the plugin, by the recorded frequencies; or name a method"
    )


# -- training --------------------------------------------------------------------------------------


def mark_trained(model: nn.Module) -> None:
    """Record that a model's weights were trained under the rotation that it has now.

    Whatever trains calls this. The record is in the live config from then on, so every way to save
    the model writes it: this package, transformers, a trainer's checkpoints, a merged adapter.
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
        return field  # damaged; what reads it raises
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


# -- agreement -------------------------------------------------------------------------------------


def describe_patch(handle: Patch) -> str:
    """Describe a patch in one line: method, lengths, options, layer types and start."""
    options = {k: v for k, v in handle.method.options().items() if k != "factor" and v is not None}
    layer_types = [str(name) for name in handle.geometries if name is not None]
    extends_scaled = any(geometry.base for geometry in handle.geometries.values())
    return "; ".join(
        [
            str(handle),
            *(
                f"{k}={f'[{len(v)} numbers]' if isinstance(v, list) else v}"
                for k, v in options.items()
            ),
            *([f"layers {', '.join(layer_types)}"] if layer_types else []),
            *(["start='running'"] if extends_scaled else []),
        ]
    )


def rotate_alike(first: Patch, second: Patch) -> bool:
    """Return whether two patches of one model change sequences of all lengths alike."""
    if first.method.start_token_count != second.method.start_token_count:
        return False
    lengths = {1.0}
    for handle in (first, second):
        trained, target = handle.trained_length, handle.length or 4 * handle.trained_length
        lengths |= {trained, trained + 1, 1.5 * trained, target, 2 * target}
    # Layer types that a patch does not change rotate as in the unpatched model.
    original = first.original_frequencies | second.original_frequencies
    for length in lengths:
        ours, theirs = (
            Rotation(original | handle.frequencies_at(length), handle.softmax_mscale)
            for handle in (first, second)
        )
        if not ours.close_to(theirs):
            return False
        if _attention_changes(first, length) != _attention_changes(second, length):
            return False
    return True


def _attention_changes(handle: Patch, length: float) -> tuple[object, ...]:
    """Return what a patch changes besides frequencies, and in which layers."""
    changes = handle.method.attention_changes(length, handle.trained_length)
    return (changes, set(handle.geometries)) if changes else ()


def matches_sidecar(handle: Patch, sidecar: dict[str, Any]) -> bool:
    """Return whether a patch has the frequencies of a sidecar."""
    return Rotation(handle.frequencies).close_to(Rotation(sidecar_frequencies(sidecar)))


def config_already_rotates_so(model: nn.Module, sidecar: dict[str, Any]) -> bool:
    """Return whether the base's own config has the recorded rotation, as a saved patch's has."""
    expected = sidecar_frequencies(sidecar)
    trained_length = sidecar["trained_length"]
    method, _ = extension_from_sidecar(sidecar).resolve(trained_length)
    if (
        not expected
        or method.start_token_count
        or method.is_length_dependent(trained_length)
        or method.attention_changes(math.inf, trained_length)
    ):
        return False
    rotaries = find_rotaries(model)
    config: Any = rotaries[0].module.config
    own_parameters = by_layer_type(config.rope_parameters)
    for layer_type in expected:
        parameters = own_parameters.get(layer_type, {})
        is_switching = parameters.get("long_factor") != parameters.get("short_factor")
        if config_rope_type(parameters) == "dynamic" or is_switching:
            return False  # the frequencies change with the length
    attentions = [a for rotary in rotaries for a in find_mla_attentions(find_owner(model, rotary))]
    for attention in filter_by_layer_type(attentions, config, expected):
        if abs(config_mscale(attention, config) - sidecar.get("sharpening", 1.0)) > 1e-6:
            return False
    module_frequencies = [reference_frequencies(rotary, config) for rotary in rotaries]
    return all(
        layer_type in by_type and by_type[layer_type].close_to(frequencies)
        for by_type in module_frequencies
        for layer_type, frequencies in expected.items()
    )
