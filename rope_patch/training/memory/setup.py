"""Training setup: the settings that a step's memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Settings of a training step; the defaults are a recipe's on one device, in float32.

    Attributes:
        rows: Rows per device and batch.
        dtype: Type of weights, gradients and optimizer states.
        compute_dtype: Type that autocast computes in; None means `dtype`.
        lora_rank: Rank of LoRA; 0 trains all weights.
        lora_targets: Linear layers with LoRA.
        lora_trains: Modules trained in full beside LoRA: embeddings, norms.
        loss: full, torch or liger.
        distils: Whether short rows are distilled from the original model.
        teacher_dtype: Type of the original model's own weights; None if it shares the trained
            model's frozen ones.
        loss_terms: Whether the loss has terms beside the cross-entropy, such as z-loss.
        checkpointing: Whether only layer inputs are saved (activation checkpointing).
        offload_activations: Whether saved activations move to CPU memory.
        attention: transformers' name of the attention implementation.
        packed_masks: Whether rows contain documents that do not see each other.
        shards: Devices that share the weights (FSDP).
        context_parallel: Devices that share a row.
        context_kind: How they share attention: allgather, ring or ulysses; see `context`.
        offload_weights: Whether the shards of weights, gradients and optimizer states are in CPU
            memory (FSDP's offload_params, DeepSpeed's offload_param).
        offload_optimizer: Whether gradients and optimizer states are in CPU memory (DeepSpeed's
            offload_optimizer).
        replicated: Whether each device has all weights and averages gradients (DDP).
        averages: Whether the finished model is the mean of several checkpoints.
        accumulates: Whether gradients of several batches are summed.
        optimizer: transformers' name of the optimizer.
    """

    rows: int = 1
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = _LORA_TARGETS
    lora_trains: tuple[str, ...] = ("embeddings", "norms")
    loss: str = "torch"
    loss_terms: bool = False
    distils: bool = False
    teacher_dtype: torch.dtype | None = None
    checkpointing: bool = True
    offload_activations: bool = False
    attention: str = "sdpa"
    packed_masks: bool = False
    shards: int = 1
    context_parallel: int = 1
    context_kind: str = "allgather"
    offload_weights: bool = False
    offload_optimizer: bool = False
    replicated: bool = False
    averages: bool = False
    accumulates: bool = False
    optimizer: str = "adamw_torch_fused"
