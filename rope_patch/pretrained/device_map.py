"""Where and in which dtype a model is loaded."""

from __future__ import annotations

from typing import Any

import torch

_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")


def require_device(device_map: Any) -> None:
    """Raise if a device map names a device type that this machine or torch lacks.

    Raises:
        ValueError: The device type is missing, or the value is no device.
    """
    devices = device_map.values() if isinstance(device_map, dict) else [device_map]
    for device in devices:
        if device is None or device in _DEVICE_MAPS:
            continue
        try:
            device_type = torch.device(device).type
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"device_map must be {', '.join(sorted(_DEVICE_MAPS))}, or a device such as cpu or "
                f"cuda:0, got {device!r}"
            ) from error
        module = torch.backends.mps if device_type == "mps" else getattr(torch, device_type, None)
        if device_type not in ("cpu", "meta") and not (module and module.is_available()):
            raise ValueError(
                f"device_map names {device!r}, and torch {torch.__version__} finds no "
                f"{device_type} device here: leave it out, or say cpu"
            )


def placement(dtype: Any, device_map: Any, process_device: Any) -> dict[str, Any]:
    """Return the `dtype` and `device_map` that `read_model` takes.

    Args:
        dtype: A dtype, its name, or "auto" or None: the checkpoint's own on a GPU, else float32.
        device_map: As in transformers; None puts the model on all GPUs, if any.
        process_device: The device of this process, which gets the whole model if it is a GPU; None
            if there is only one process.
    """
    has_gpu = torch.cuda.is_available()
    if dtype in (None, "auto"):
        dtype = "auto" if has_gpu else torch.float32
    elif isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if process_device is not None and process_device.type != "cpu":
        device_map = {"": process_device}
    return {"dtype": dtype, "device_map": device_map or ("auto" if has_gpu else None)}
