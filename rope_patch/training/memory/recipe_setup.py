"""Read from a recipe and a launch file what the memory of a training step depends on.

`read_environment` turns a launch file of accelerate into the variables that its launcher sets in
every process: a plan needs the devices' layout, and is made on machines that have none of them.
`training_setup` turns a recipe, its model's config and these variables into a `TrainingSetup`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import functional

from rope_patch.training.memory.model import TrainingSetup
from rope_patch.utils.errors import one_line
from rope_patch.utils.installation import resource_folder
from rope_patch.utils.strict_yaml import read_yaml


def training_setup(
    settings: Any,
    config: Any,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainingSetup:
    """Return the settings of a recipe that a step's memory depends on.

    Args:
        settings: The recipe, from `rope_patch.training.settings.parse_settings`.
        config: The config of its model.
        processes: Processes that share the work; None reads `accelerate launch`'s variables.
        environment: Variables set by `accelerate launch`; None reads this process's environment.
    """
    extension, training, data = settings.extension, settings.training, settings.data
    variables = os.environ if environment is None else environment
    world = int(variables.get("WORLD_SIZE", "1")) if processes is None else processes
    sizes = {
        name: int(variables.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("CP", "SP", "DP_REPLICATE")
    }
    fsdp = variables.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    deepspeed = variables.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    is_sharded = fsdp or (deepspeed and variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3")
    offloads = {
        what: deepspeed
        and variables.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") != "none"
        for what in ("OPTIMIZER", "PARAM")
    }
    offloads["PARAM"] |= fsdp and variables.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    passes = variables.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather") == "alltoall"
    dtype = getattr(torch, extension.dtype)
    compute = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else dtype
    distils = settings.objective.distillation_weight > 0
    shares_weights = extension.lora_rank > 0 and not is_sharded
    return TrainingSetup(
        distils=distils,
        teacher_dtype=compute if distils and not shares_weights else None,
        rows=training.per_device_train_batch_size,
        dtype=dtype,
        compute_dtype=compute,
        lora_rank=extension.lora_rank,
        lora_targets=tuple(extension.lora_targets),
        lora_trains=tuple(extension.lora_trains),
        loss=_resolved_loss(settings.loss, config, has_terms=extension.z_loss > 0),
        loss_terms=extension.z_loss > 0,
        checkpointing=bool(training.gradient_checkpointing),
        offload_activations=extension.offload_activations,
        attention=extension.attention,
        packed_masks=data.needs_masks,
        shards=max(1, world // sizes["DP_REPLICATE"]) if is_sharded else 1,
        context_parallel=sizes["CP"] * sizes["SP"],
        context_kind="ulysses" if sizes["SP"] > 1 else "ring" if passes else "allgather",
        offload_weights=offloads["PARAM"],
        offload_optimizer=offloads["OPTIMIZER"],
        replicated=world > 1 and not is_sharded,
        averages=extension.average_checkpoints > 0,
        accumulates=training.gradient_accumulation_steps > 1,
        optimizer=getattr(training.optim, "value", training.optim),
    )


def _resolved_loss(loss: str, config: Any, has_terms: bool = False) -> str:
    """Return the loss that training will use, as far as the config tells."""
    if loss != "auto":
        return loss
    caps = getattr(config.get_text_config(decoder=True), "final_logit_softcapping", None)
    # With terms beside the cross-entropy, the chunks need no function of torch.
    has_chunks = has_terms or hasattr(functional, "linear_cross_entropy")
    return "torch" if has_chunks and not caps else "full"


GIB = 2**30
# Memory that torch reports of an RTX 4090, an H100 and an H200: a device "of 24 GB" has at most
# 24 GiB, less its driver's share.
DEVICES = {"24 GB": int(23.5 * GIB), "80 GB": int(79.1 * GIB), "141 GB": int(139.7 * GIB)}
DEVICE_LAYOUTS: dict[str, dict[str, Any]] = {
    "1 GPU": {},
    "8, FSDP2": {"shards": 8},
    "8, FSDP2, context parallel": {"shards": 8, "context_parallel": 8},
}
SHAPES = resource_folder("recipes/shapes")


def format_gib(size: int) -> str:
    """Return bytes in GiB, with two decimals."""
    return f"{size / GIB:,.2f} GiB"


def format_tokens(length: int) -> str:
    """Return a number of tokens, or a dash if nothing fits."""
    return f"{length:,}" if length else "–"


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
