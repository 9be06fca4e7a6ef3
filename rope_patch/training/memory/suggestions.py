"""Changes of a recipe that make it fit into a device's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rope_patch.training.memory.devices import format_gib
from rope_patch.training.memory.model import RESERVE, longest_row, memory_need
from rope_patch.training.memory.setup import TrainingSetup


def suggest_changes(config: Any, length: int, setup: TrainingSetup, available: int) -> list[str]:
    """Return single settings that make a recipe fit, and its longest row that fits unchanged.

    Args:
        config: The config of the recipe's model.
        length: Tokens of a row.
        setup: The recipe's setup.
        available: Bytes of the device, of which `RESERVE` stays free.
    """
    masks = setup.packed_masks and setup.attention == "sdpa"
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (not setup.checkpointing, "gradient_checkpointing: true", {"checkpointing": True}),
        (setup.loss == "full", "loss: torch", {"loss": "torch"}),
        (setup.attention == "eager", "attention: sdpa", {"attention": "sdpa"}),
        (masks, "attention: flash_attention_2", {"attention": "flash_attention_2"}),
        (setup.rows > 1, "per_device_train_batch_size: 1", {"rows": 1}),
        (not setup.offload_activations, "offload_activations: true", {"offload_activations": True}),
        (setup.lora_rank == 0, "lora_rank: 8", {"lora_rank": 8}),
        (setup.shards == 1, "8 GPUs with FSDP", {"shards": 8, "replicated": False}),
        (
            setup.context_parallel == 1 and not setup.packed_masks,
            "8 GPUs with FSDP and context parallelism",
            {"shards": max(8, setup.shards), "context_parallel": 8, "replicated": False},
        ),
    ]
    usable, combined = available * (1 - RESERVE), setup
    suggestions: list[str] = []
    names: list[str] = []
    for applies, name, change in changes:
        need = memory_need(config, length=length, **vars(replace(setup, **change)))
        if applies and need.total <= usable:
            suggestions.append(f"{name} ({format_gib(need.total)})")
    if longest := longest_row(config, available, **vars(setup)):
        suggestions.append(f"train_length: {longest} or less")
    for _, name, change in [] if suggestions else [entry for entry in changes if entry[0]]:
        combined, names = replace(combined, **change), [*names, name]
        need = memory_need(config, length=length, **vars(combined))
        if need.total <= usable:
            return [f"{', '.join(names)}, all at once ({format_gib(need.total)})"]
    return suggestions or ["larger or more devices, or a smaller model"]
