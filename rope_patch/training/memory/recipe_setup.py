"""The training setup of a recipe, on the devices that `accelerate launch` describes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from rope_patch.training.memory.setup import TrainingSetup


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
