"""Whether a base rotates as it did when an adapter was trained on it.

What counts are the frequencies in effect, for sequences of every length; words are for the errors.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies, build
from rope_patch.patching import Patch, check, current
from rope_patch.patching.find import find_owner, find_rotaries
from rope_patch.patching.rotary import unpatched
from rope_patch.patching.softmax import config_sharpening, find_sharpened, of_layer_types
from rope_patch.reading import by_layer_type, own_scaling
from rope_patch.saving import SIDECAR, read_sidecar, recorded_request

logger = logging.getLogger("rope_patch")


def require_agreement(model: nn.Module, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
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
                describe(standing),
            )
        return None
    if standing is None and _runs_so(model, sidecar):
        return None
    request = recorded_request(sidecar)
    trained_with = f"the adapter in {folder} was trained on a base that was patched with"
    try:
        wanted = Patch(check(model, **request))
    except (ValueError, TypeError) as error:
        said = ", ".join(f"{k}={v!r}" for k, v in request.items() if v is not None)
        raise ValueError(f"{trained_with} {said}, which this one cannot be: {error}") from error
    if not _same_base(wanted, sidecar):
        raise ValueError(
            f"{trained_with} {describe(wanted)}, and that would rotate {type(model).__name__} "
            f"otherwise: the config of its base said {sidecar['original']}, that of this one says "
            f"{wanted.original}; load the base that the adapter was trained on"
        )
    if standing is None:
        return request
    if not _same(wanted, standing):
        raise ValueError(
            f"{trained_with} {describe(wanted)}, got one that is patched with "
            f"{describe(standing)}; rope_patch.unpatch(model) first, and load_adapter patches it "
            "as the adapter needs it"
        )
    return None


def describe(handle: Patch) -> str:
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


def _same(wanted: Patch, standing: Patch) -> bool:
    """Whether two patches of one model rotate sequences of all lengths alike."""
    if abs(wanted.sharpening - standing.sharpening) > 1e-6:
        return False
    if wanted.method.kept_tokens != standing.method.kept_tokens:
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


def _recorded(sidecar: dict[str, Any]) -> dict[str | None, Frequencies]:
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


def _same_base(wanted: Patch, sidecar: dict[str, Any]) -> bool:
    """Whether the recorded patch, put on this base, comes to the recorded frequencies."""
    recorded = _recorded(sidecar)
    return recorded.keys() == wanted.frequencies.keys() and all(
        frequencies.close_to(recorded[kind]) for kind, frequencies in wanted.frequencies.items()
    )


def _runs_so(model: nn.Module, sidecar: dict[str, Any]) -> bool:
    """Whether the base's own config makes it rotate as the patch did: saved with it, say."""
    recorded = _recorded(sidecar)
    method = build(sidecar["method"], **sidecar["options"])
    if not recorded or method.kept_tokens or method.follows_length(sidecar["trained_length"]):
        return False
    rotaries = find_rotaries(model)
    config: Any = rotaries[0].module.config
    standing = by_layer_type(config.rope_parameters)
    for kind in recorded:
        own = standing.get(kind, {})
        switches = own.get("long_factor") != own.get("short_factor")
        if own_scaling(own) == "dynamic" or switches:  # then no one set is all there is
            return False
    attentions = [a for rotary in rotaries for a in find_sharpened(find_owner(model, rotary))]
    for attention in of_layer_types(attentions, config, recorded):
        if abs(config_sharpening(attention, config) - sidecar.get("sharpening", 1.0)) > 1e-6:
            return False
    found = [unpatched(rotary, config) for rotary in rotaries]
    return all(
        kind in rotates and rotates[kind].close_to(frequencies)
        for rotates in found
        for kind, frequencies in recorded.items()
    )
