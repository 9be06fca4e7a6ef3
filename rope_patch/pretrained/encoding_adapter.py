"""PEFT adapters of models that do not rotate, which fit one extension of their base."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from rope_patch.extension import Extension
from rope_patch.patching import check_encoding
from rope_patch.patching.encodings.handle import EncodingPatch, current_encoding
from rope_patch.utils.errors import Refused


def require_same_encoding(
    model: nn.Module,
    folder: str | os.PathLike[str],
    sidecar: dict[str, Any],
    extension: Extension,
) -> Extension | None:
    """Return how to extend a base so that it reads positions as an adapter's base in training.

    Args:
        model: The base. It is not changed.
        folder: The adapter's folder.
        sidecar: The adapter's sidecar.
        extension: The request that the sidecar records.

    Returns:
        The request to patch it with, or None if it is patched so already.

    Raises:
        ValueError: The base is extended otherwise, or cannot be extended so.
    """
    trained_with = (
        f"the adapter in {folder} was trained on a base that was patched with {extension.method}, "
        f"{sidecar['trained_length']:,} → {sidecar['target_length'] or 'any length'} tokens"
    )
    active = current_encoding(model)
    if active is not None:
        if not is_same_encoding(active, sidecar):
            raise Refused(
                f"{trained_with}, got one that is patched with {active}; rope_patch.unpatch(model) "
                "first, and load_adapter patches it as the adapter needs it"
            )
        return None
    try:
        plan = check_encoding(model, extension)
    except (Refused, TypeError) as error:
        raise Refused(f"{trained_with}, which this one cannot be: {error}") from error
    if plan is None:
        raise Refused(f"{trained_with}, and {type(model).__name__} rotates: load the adapter's own")
    before: Any = plan.model.config
    differing = {
        name: getattr(before, name, None)
        for name, value in sidecar["original"].items()
        if getattr(before, name, None) != value
    }
    if differing:
        raise Refused(
            f"{trained_with} and whose config said {sidecar['original']} before; this one says "
            f"{differing}: load the base that the adapter was trained on"
        )
    return extension


def is_same_encoding(active: EncodingPatch, sidecar: dict[str, Any]) -> bool:
    """Return whether a patch extends the places that a sidecar records, in the same way."""
    return (
        active.method == sidecar["method"]
        and active.trained_length == sidecar["trained_length"]
        and active.length == sidecar["target_length"]
        and {site.name for site in active.sites} == set(sidecar["positions"])
    )
