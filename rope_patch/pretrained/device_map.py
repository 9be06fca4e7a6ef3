"""The devices that a model is asked to be put on."""

from __future__ import annotations

from typing import Any

import torch

_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")


def require_device(device_map: Any) -> None:
    """Raise if a device map names a kind of device that this machine or torch lacks.

    Raises:
        ValueError: Such a device, or no device at all.
    """
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    for place in places:
        if place is None or place in _DEVICE_MAPS:
            continue
        try:
            kind = torch.device(place).type
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"device_map must be {', '.join(sorted(_DEVICE_MAPS))}, or a device such as cpu or "
                f"cuda:0, got {place!r}"
            ) from error
        module = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
        if kind not in ("cpu", "meta") and not (module and module.is_available()):
            raise ValueError(
                f"device_map names {place!r}, and torch {torch.__version__} finds no {kind} device "
                "here: leave it out, or say cpu"
            )
