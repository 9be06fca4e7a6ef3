"""Launch files of accelerate, as the variables that its launcher sets in every process.

A plan needs the layout of the devices, and is made where there are none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rope_patch.utils.errors import one_line
from rope_patch.utils.strict_yaml import read_yaml


def read_environment(path: Path, processes: int | None = None) -> dict[str, str]:
    """Return the variables of a launch file that a memory plan depends on.

    Args:
        path: A YAML file for `accelerate launch --config_file`.
        processes: Number of processes, instead of the file's.

    Raises:
        ValueError: The file is no launch file, or its sizes do not fit its processes.
    """
    try:
        config = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {one_line(str(error))}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ValueError(
            f"{path}: expected a launch file of accelerate, with distributed_type and "
            "num_processes; `rope-patch recipes` lists those of the package"
        )
    if processes is None:
        written = config.get("num_processes")
        processes = 1 if written is None else int(written)
    world = processes
    kind = str(config["distributed_type"])
    environment = {
        "WORLD_SIZE": str(world),
        "ACCELERATE_USE_FSDP": _to_text(kind == "FSDP"),
        "ACCELERATE_USE_DEEPSPEED": _to_text(kind == "DEEPSPEED"),
    }
    fsdp, deepspeed = config.get("fsdp_config") or {}, config.get("deepspeed_config") or {}
    environment["FSDP_OFFLOAD_PARAMS"] = _to_text(fsdp.get("fsdp_offload_params", False))
    environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = _to_text(deepspeed.get("zero_stage", 2))
    for what in ("optimizer", "param"):
        device = deepspeed.get(f"offload_{what}_device", "none")
        environment[f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE"] = _to_text(device)
    parallelism = config.get("parallelism_config") or {}
    environment |= {key.upper(): _to_text(value) for key, value in parallelism.items()}
    shared = 1
    for name in ("CP", "SP", "TP"):
        shared *= int(environment.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
    if world % shared:
        raise ValueError(
            f"{path}: {shared} devices share a row, so the number of processes must be a multiple "
            f"of {shared}, got {world}"
        )
    return environment


def _to_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
