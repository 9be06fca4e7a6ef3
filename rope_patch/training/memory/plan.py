"""What memory a recipe needs on each device, what row length fits, and what to change if none does.

`python -m rope_patch.training.memory.plan` prints the lengths that fit. How it is computed, and
what of it was never measured (all of a GPU), is said in `rope_patch.training.memory.model`;
`recipes/experiments/check_memory_plan.py` compares it with what a step on a CPU takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from rope_patch.patching import check as check_request
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.rope_config import read_geometries
from rope_patch.training.memory.model import (
    RESERVE,
    MemoryNeed,
    TrainingSetup,
    longest_row,
    memory_need,
)
from rope_patch.utils.resources import resource_folder

__all__ = [
    "RESERVE",
    "MemoryNeed",
    "TrainingSetup",
    "format_plan",
    "from_settings",
    "longest_row",
    "memory_need",
    "require_device",
]
__all__ += ["lengths_table", "require_memory", "to_dict"]

GIB = 2**30
# What torch reports of an RTX 4090, an H100 and an H200: a device "of 24 GB" has 24 GiB at most,
# less what its driver keeps.
DEVICES = {"24 GB": int(23.5 * GIB), "80 GB": int(79.1 * GIB), "141 GB": int(139.7 * GIB)}
SHAPES = resource_folder("recipes/shapes")
_MODELS = {"1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}
_TRAINING_MODES: dict[str, dict[str, Any]] = {
    "all weights, float32, bf16 products": {"compute_dtype": torch.bfloat16},
    "all weights, bf16": {"dtype": torch.bfloat16},
    "LoRA 8, embeddings, norms": {"compute_dtype": torch.bfloat16, "lora_rank": 8},
}
_DEVICE_LAYOUTS: dict[str, dict[str, Any]] = {
    "1 GPU": {},
    "8, FSDP2": {"shards": 8},
    "8, FSDP2, context parallel": {"shards": 8, "context_parallel": 8},
}


def from_settings(
    settings: Any, *, processes: int | None = None, environment: Mapping[str, str] | None = None
) -> MemoryNeed:
    """What a recipe needs on each device.

    Args:
        settings: The recipe, as `rope_patch.training.settings.parse` gives it.
        processes: How many share the work; what `accelerate launch` said unless given.
        environment: Variables that `accelerate launch` sets; the process's own unless given.
    """
    config = _read_config(settings)
    how = _training_setup(settings, config, processes, environment)
    return memory_need(config, length=_row_length(settings, config), **vars(how))


def require_memory(need: MemoryNeed, available: int, suggestions: Sequence[str] = ()) -> None:
    """Refuses a step that a device's memory is too small for.

    Args:
        need: What the step needs.
        available: Bytes of the device, of which `RESERVE` is left free.
        suggestions: What would make it fit; general advice unless given.

    Raises:
        ValueError: Says what is needed by part, what there is, and what to change.
    """
    usable = int(available * (1 - RESERVE))
    if need.total <= usable:
        return
    parts = ", ".join(f"{name} {_format_gib(size)}" for name, size in need.parts().items() if size)
    advice = suggestions or (
        "gradient_checkpointing: true",
        "loss: torch",
        "offload_activations: true",
        "lora_rank: 8",
        "more GPUs with FSDP",
        "a shorter train_length",
    )
    raise ValueError(
        f"a step needs {_format_gib(need.total)} on each device ({parts}; most in: {need.moment}), but "
        f"the device has {_format_gib(available)}, {_format_gib(usable)} of it to be planned with; expected one "
        "of: " + "; ".join(advice) + " (ignore_plan: true starts anyway)"
    )


def require_device(settings: Any) -> None:
    """Refuses a recipe that this process's device is too small for; see `require_memory`."""
    if (available := _device_memory(settings)) is None:
        return
    config = _read_config(settings)
    how, length = _training_setup(settings, config), _row_length(settings, config)
    need = memory_need(config, length=length, **vars(how))
    short = need.total > available * (1 - RESERVE)
    require_memory(need, available, _suggestions(config, length, how, available) if short else ())


def to_dict(settings: Any) -> dict[str, Any]:
    """The plan of a recipe as numbers, in bytes and tokens."""
    config = _read_config(settings)
    how, length = _training_setup(settings, config), _row_length(settings, config)
    need, training = memory_need(config, length=length, **vars(how)), settings.training
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = how.rows * training.gradient_accumulation_steps * max(1, world // how.context_parallel)
    tokens = settings.extension.tokens
    steps = training.max_steps if tokens is None else -(-int(tokens) // (rows * length))
    return {
        "model": settings.extension.model,
        "length": length,
        "processes": world,
        "shards": how.shards,
        "context_parallel": how.context_parallel,
        "loss": how.loss,
        "need": {**need.parts(), "total": need.total},
        "moment": need.moment,
        "steps": steps,
        "tokens_per_step": rows * length,
        "tokens": steps * rows * length,
        "reserve": RESERVE,
        "longest": {
            spread: {
                name: longest_row(config, size, **vars(replace(how, **split)))
                for name, size in DEVICES.items()
            }
            for spread, split in (_DEVICE_LAYOUTS if world == 1 else {"as it is": {}}).items()
        },
    }


def format_plan(settings: Any, as_json: bool = False) -> str:
    """The plan of a recipe, to be read; or as JSON."""
    said = to_dict(settings)
    if as_json:
        return json.dumps(said, indent=2)
    spread = f"{said['processes']} process{'es' if said['processes'] > 1 else ''}"
    if said["shards"] > 1:
        spread += f", weights in {said['shards']} shards"
    if said["context_parallel"] > 1:
        spread += f", rows in {said['context_parallel']} parts"
    lines = [
        f"{said['model']}: rows of {said['length']:,} tokens, {spread}",
        f"{said['steps']:,} steps of {said['tokens_per_step']:,} tokens: {said['tokens']:,} in all",
        "",
        f"memory on each device, in the moment that needs most ({said['moment']}):",
    ]
    lines += [f"  {name:<12}{_format_gib(size):>14}" for name, size in said["need"].items()]
    lines += ["", f"longest rows that fit, {RESERVE:.0%} of a device left free:"]
    for spread, longest in said["longest"].items():
        fitting = "".join(
            f"{name:>8}{_format_tokens(tokens):>12}" for name, tokens in longest.items()
        )
        lines.append(f"  {spread:<28}{fitting}")
    lines.append("planned from the config alone; checked on CPUs, never on a GPU")
    return "\n".join(lines)


def lengths_table() -> str:
    """The longest rows of two models on three devices, as Markdown."""
    lines = ["| model | trained | GPUs | " + " | ".join(DEVICES) + " |"]
    lines.append("|---" * 3 + "|---:" * len(DEVICES) + "|")
    for model, folder in _MODELS.items():
        config = read_config(SHAPES / folder)
        for way, how in _TRAINING_MODES.items():
            for spread, shared in _DEVICE_LAYOUTS.items():
                found = [
                    _format_tokens(longest_row(config, size, **how, **shared))
                    for size in DEVICES.values()
                ]
                lines.append(f"| {model} | {way} | {spread} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def _read_config(settings: Any) -> Any:
    return read_config(demo.resolve_model_path(settings.extension.model))


def _row_length(settings: Any, config: Any) -> int:
    """Tokens of a row, as `preparing.prepare` will have it."""
    asked = settings.extension
    if asked.train_length:
        return asked.train_length
    if asked.method != "none":
        request = {name: getattr(asked, name) for name in ("factor", "length", "trained_length")}
        request |= {"layer_types": asked.layer_types, **settings.method_options}
        planned = check_request(empty_model(asked.model, config), asked.method, **request)
        if planned.length is not None:
            return planned.length
    text = config.get_text_config(decoder=True)
    return next(iter(read_geometries(text, asked.trained_length).values())).trained_length


def _training_setup(
    settings: Any,
    config: Any,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainingSetup:
    asked, training, data = settings.extension, settings.training, settings.data
    said = os.environ if environment is None else environment
    world = processes or int(said.get("WORLD_SIZE", "1"))
    sizes = {
        name: int(said.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("CP", "SP", "DP_REPLICATE")
    }
    fsdp = said.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    deepspeed = said.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    shares = fsdp or (deepspeed and said.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3")
    dtype = getattr(torch, asked.dtype)
    compute = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else dtype
    return TrainingSetup(
        rows=training.per_device_train_batch_size,
        dtype=dtype,
        compute_dtype=compute,
        lora_rank=asked.lora_rank,
        lora_targets=tuple(asked.lora_targets),
        lora_trains=tuple(asked.lora_trains),
        loss=_resolved_loss(settings.loss, config),
        checkpointing=bool(training.gradient_checkpointing),
        offload_activations=asked.offload_activations,
        attention=asked.attention,
        packed_masks=data.packing == "masked" or data.short_share > 0,
        shards=max(1, world // sizes["DP_REPLICATE"]) if shares else 1,
        context_parallel=sizes["CP"] * sizes["SP"],
        replicated=world > 1 and not shares,
        accumulates=training.gradient_accumulation_steps > 1,
        optimizer=getattr(training.optim, "value", training.optim),
    )


def _resolved_loss(asked: str, config: Any) -> str:
    """Which loss `losses.use` will take, as far as a config tells."""
    if asked != "auto":
        return asked
    caps = getattr(config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return "full" if caps or not hasattr(functional, "linear_cross_entropy") else "torch"


def _device_memory(settings: Any) -> int | None:
    """Bytes of this process's GPU, or of the machine where it has none; None if unknown."""
    if torch.cuda.is_available() and not settings.training.use_cpu:
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return torch.cuda.get_device_properties(index).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _suggestions(config: Any, length: int, how: TrainingSetup, available: int) -> list[str]:
    """Settings that make a recipe fit, each on its own; and the longest row that fits as it is."""
    masks = how.packed_masks and how.attention == "sdpa"
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (not how.checkpointing, "gradient_checkpointing: true", {"checkpointing": True}),
        (how.loss == "full", "loss: torch", {"loss": "torch"}),
        (how.attention == "eager", "attention: sdpa", {"attention": "sdpa"}),
        (masks, "attention: flash_attention_2", {"attention": "flash_attention_2"}),
        (how.rows > 1, "per_device_train_batch_size: 1", {"rows": 1}),
        (not how.offload_activations, "offload_activations: true", {"offload_activations": True}),
        (how.lora_rank == 0, "lora_rank: 8", {"lora_rank": 8}),
        (how.shards == 1, "8 GPUs with FSDP", {"shards": 8, "replicated": False}),
        (
            how.context_parallel == 1 and not how.packed_masks,
            "8 GPUs with FSDP and context parallelism",
            {"shards": max(8, how.shards), "context_parallel": 8, "replicated": False},
        ),
    ]
    usable, together = available * (1 - RESERVE), how
    alone: list[str] = []
    names: list[str] = []
    for applies, name, change in changes:
        need = memory_need(config, length=length, **vars(replace(how, **change)))
        if applies and need.total <= usable:
            alone.append(f"{name} ({_format_gib(need.total)})")
    if longest := longest_row(config, available, **vars(how)):
        alone.append(f"train_length: {longest} or less")
    for _, name, change in [] if alone else [entry for entry in changes if entry[0]]:
        together, names = replace(together, **change), [*names, name]
        need = memory_need(config, length=length, **vars(together))
        if need.total <= usable:
            return [f"{', '.join(names)}, all at once ({_format_gib(need.total)})"]
    return alone or ["larger or more devices, or a smaller model"]


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


def _format_tokens(length: int) -> str:
    return f"{length:,}" if length else "–"


if __name__ == "__main__":
    print(lengths_table())
