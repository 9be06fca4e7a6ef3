"""Check that a model in a trainer still rotates as it was patched to."""

from __future__ import annotations

from typing import Any

from torch import nn

from rope_patch.extension import Extension
from rope_patch.patching import Patch, check
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.encodings.handle import EncodingPatch
from rope_patch.patching.restoration import lost_patched_buffers
from rope_patch.pretrained.encoding_adapter import is_same_encoding
from rope_patch.pretrained.encoding_checkpoint import is_encoding_sidecar
from rope_patch.pretrained.rotation_agreement import (
    describe_patch,
    matches_sidecar,
    rotate_alike,
)
from rope_patch.pretrained.sidecar import extension_from_sidecar
from rope_patch.utils.errors import Refused


def require_acting(model: nn.Module, handle: Patch) -> None:
    """Raise unless a patch acts in all of a model: its modules, frequencies and config.

    Args:
        model: The model, in whatever wrappers.
        handle: The patch in effect.

    Raises:
        ValueError: A rotary module is not the patched one, holds other frequencies, or the config
            states another rotation; says what to do.
    """
    rotaries = find_rotaries(model)
    replaced = [r for r in rotaries if vars(r.module).get("_rope_patch") is not handle]
    if replaced:
        raise Refused(
            f"{len(replaced)} of {len(rotaries)} rotary modules were replaced after the model was "
            f"patched with {handle}, and rotate as unpatched: patch the model after whatever "
            "builds its modules, or name the method in RopePatchCallback"
        )
    lost = [f"{type(rotary.module).__name__}.{name}" for rotary, name in _lost(model, handle)]
    if lost:
        raise Refused(
            f"{', '.join(lost)} no longer holds the frequencies of {handle}: something moved, "
            "cast or reinitialised them after the model was patched; rope_patch.restore(model) "
            "sets them again"
        )
    config: Any = getattr(model, "config", None)
    patched_config: Any = rotaries[0].module.config
    text = config.get_text_config(decoder=True) if config is not None else patched_config
    stated, patched = text.rope_parameters, patched_config.rope_parameters
    if stated != patched:
        raise Refused(
            f"the model's config was replaced after it was patched with {handle}, so that a saved "
            f"model would rotate otherwise: expected rope_parameters {patched}, got {stated}; "
            "change the config before the model is patched"
        )


def _lost(model: nn.Module, handle: Patch) -> list[Any]:
    # Frequencies of a model on meta have no values to compare.
    return [
        (rotary, name)
        for rotary, name in lost_patched_buffers(model, handle)
        if not getattr(rotary.module, name).is_meta
    ]


def require_requested(
    model: nn.Module, handle: Patch | EncodingPatch, extension: Extension
) -> None:
    """Raise unless a model is patched as requested.

    Raises:
        ValueError: It is patched otherwise; names both.
    """
    if isinstance(handle, EncodingPatch):
        wanted = {**extension.arguments(), "method": extension.method}
        got = {**handle.extension.to_dict(), **handle.extension.options}
        same = all(got.get(name) == value for name, value in wanted.items())
        asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    else:
        requested = Patch(check(model, extension))
        same, asked = rotate_alike(requested, handle), describe_patch(requested)
    if not same:
        raise Refused(
            f"RopePatchCallback is to train with {asked}, and the model is patched with "
            f"{describe(handle)}: rope_patch.unpatch(model) first, or leave the callback's method "
            "out to train it as it is"
        )


def require_recorded_rotation(
    model: nn.Module, handle: Patch | EncodingPatch, sidecar: dict[str, Any], checkpoint: str
) -> None:
    """Raise unless a model rotates as a checkpoint's did.

    Args:
        model: The model that resumes.
        handle: Its patch.
        sidecar: What the checkpoint records of its patch.
        checkpoint: The checkpoint, for the message.

    Raises:
        ValueError: It rotates otherwise, or cannot rotate so.
    """
    resume = f"{checkpoint} cannot be resumed: it was trained with"
    advice = (
        "resume with the checkpoint's own rotation, or load its folder as the model of a new run"
    )
    recorded = f"{sidecar['method']}, {sidecar['target_length'] or 'any'} tokens"
    if isinstance(handle, EncodingPatch) or is_encoding_sidecar(sidecar):
        same = (
            isinstance(handle, EncodingPatch)
            and is_encoding_sidecar(sidecar)
            and is_same_encoding(handle, sidecar)
        )
    else:
        try:
            trained = Patch(check(model, extension_from_sidecar(sidecar)))
        except (Refused, TypeError) as error:
            raise Refused(
                f"{resume} {recorded}, which this model cannot be: {error}; {advice}"
            ) from error
        recorded = describe_patch(trained)
        same = matches_sidecar(trained, sidecar) and rotate_alike(trained, handle)
    if not same:
        raise Refused(
            f"{resume} {recorded}, and the model is patched with {describe(handle)}; {advice}"
        )


def describe(handle: Patch | EncodingPatch) -> str:
    """Describe a patch in one line."""
    return describe_patch(handle) if isinstance(handle, Patch) else str(handle)
