"""Memory plan of a recipe: bytes per device, the longest rows that fit, suggestions if none does.

`python -m rope_patch.training.memory.plan` prints the lengths that fit. The computation, and what
of it was never measured (everything on a GPU), is described in `rope_patch.training.memory.model`;
`recipes/experiments/check_memory_plan.py` compares it with the peak of a step on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from rope_patch.original_config import original_config
from rope_patch.patching import check as check_request
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.rope_config import read_geometries
from rope_patch.training.memory.model import RESERVE, MemoryNeed, longest_row, memory_need
from rope_patch.training.memory.setup import TrainingSetup
from rope_patch.utils.errors import Refused
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
# Memory that torch reports of an RTX 4090, an H100 and an H200: a device "of 24 GB" has at most
# 24 GiB, less its driver's share.
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
    """Return the memory that a recipe needs on each device.

    Args:
        settings: The recipe, from `rope_patch.training.settings.parse`.
        processes: Processes that share the work; None reads `accelerate launch`'s variables.
        environment: Variables set by `accelerate launch`; None reads this process's environment.
    """
    config = _read_config(settings)
    setup = _training_setup(settings, config, processes, environment)
    return memory_need(config, length=_row_length(settings, config), **vars(setup))


def require_memory(need: MemoryNeed, available: int, suggestions: Sequence[str] = ()) -> None:
    """Raise if a device has too little memory for a step.

    Args:
        need: The step's need.
        available: Bytes of the device, of which `RESERVE` stays free.
        suggestions: Changes that make it fit; general advice if empty.

    Raises:
        ValueError: The step does not fit; names the need by part, the memory, and the changes.
    """
    usable_bytes = int(available * (1 - RESERVE))
    if need.total <= usable_bytes:
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
        f"a step needs {_format_gib(need.total)} on each device ({parts}; most in: "
        f"{need.moment}), but "
        f"the device has {_format_gib(available)}, {_format_gib(usable_bytes)} of it to be planned "
        "with; expected one "
        "of: " + "; ".join(advice) + " (ignore_plan: true starts anyway)"
    )


def require_device(settings: Any) -> None:
    """Raise if this process's device is too small for a recipe; see `require_memory`."""
    if (available := _device_memory(settings)) is None:
        return
    config = _read_config(settings)
    setup, length = _training_setup(settings, config), _row_length(settings, config)
    need = memory_need(config, length=length, **vars(setup))
    short = need.total > available * (1 - RESERVE)
    require_memory(need, available, _suggestions(config, length, setup, available) if short else ())


def to_dict(settings: Any) -> dict[str, Any]:
    """Return a recipe's plan as JSON data, in bytes and tokens."""
    config = _read_config(settings)
    setup, length = _training_setup(settings, config), _row_length(settings, config)
    need, training = memory_need(config, length=length, **vars(setup)), settings.training
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = (
        setup.rows * training.gradient_accumulation_steps * max(1, world // setup.context_parallel)
    )
    tokens = settings.extension.tokens
    steps = training.max_steps if tokens is None else -(-int(tokens) // (rows * length))
    return {
        "model": settings.extension.model,
        "length": length,
        "processes": world,
        "shards": setup.shards,
        "context_parallel": setup.context_parallel,
        "loss": setup.loss,
        "need": {**need.parts(), "total": need.total},
        "moment": need.moment,
        "steps": steps,
        "tokens_per_step": rows * length,
        "tokens": steps * rows * length,
        "reserve": RESERVE,
        "longest": {
            spread: {
                name: longest_row(config, size, **vars(replace(setup, **split)))
                for name, size in DEVICES.items()
            }
            for spread, split in (_DEVICE_LAYOUTS if world == 1 else {"as it is": {}}).items()
        },
    }


def format_plan(settings: Any, as_json: bool = False) -> str:
    """Return a recipe's plan as text or JSON."""
    numbers = to_dict(settings)
    if as_json:
        return json.dumps(numbers, indent=2)
    spread = f"{numbers['processes']} process{'es' if numbers['processes'] > 1 else ''}"
    if numbers["shards"] > 1:
        spread += f", weights in {numbers['shards']} shards"
    if numbers["context_parallel"] > 1:
        spread += f", rows in {numbers['context_parallel']} parts"
    lines = [
        f"{numbers['model']}: rows of {numbers['length']:,} tokens, {spread}",
        f"{numbers['steps']:,} steps of {numbers['tokens_per_step']:,} tokens: "
        f"{numbers['tokens']:,} in all",
        "",
        f"memory on each device, in the moment that needs most ({numbers['moment']}):",
    ]
    lines += [f"  {name:<12}{_format_gib(size):>14}" for name, size in numbers["need"].items()]
    lines += ["", f"longest rows that fit, {RESERVE:.0%} of a device left free:"]
    for spread, longest in numbers["longest"].items():
        fitting = "".join(
            f"{name:>8}{_format_tokens(tokens):>12}" for name, tokens in longest.items()
        )
        lines.append(f"  {spread:<28}{fitting}")
    lines.append("planned from the config alone; checked on CPUs, never on a GPU")
    return "\n".join(lines)


def lengths_table() -> str:
    """Return the longest rows of two models on three devices, as Markdown."""
    lines = ["| model | trained | GPUs | " + " | ".join(DEVICES) + " |"]
    lines.append("|---" * 3 + "|---:" * len(DEVICES) + "|")
    for model, folder in _MODELS.items():
        config = read_config(SHAPES / folder)
        for mode, setup in _TRAINING_MODES.items():
            for spread, layout in _DEVICE_LAYOUTS.items():
                lengths = [
                    _format_tokens(longest_row(config, size, **setup, **layout))
                    for size in DEVICES.values()
                ]
                lines.append(f"| {model} | {mode} | {spread} | " + " | ".join(lengths) + " |")
    return "\n".join(lines)


def _read_config(settings: Any) -> Any:
    """Return the config of a recipe's model.

    Raises:
        ValueError: It does not rotate: documents packed in a row would share its positions.
    """
    name = settings.extension.model
    config = read_config(demo.resolve_model_path(name))
    text = config.get_text_config(decoder=True)
    if not getattr(text, "rope_parameters", None):
        raise Refused(
            f"recipes train models that rotate, and {name} ({text.model_type}) does not: train the "
            "extended model of rope_patch.load with transformers' Trainer, and write it with "
            "rope_patch.save, which keeps a trained table"
        )
    return config


def _row_length(settings: Any, config: Any) -> int:
    """Return the tokens per row that `model_setup.prepare` will use."""
    extension = settings.extension
    if extension.train_length:
        return extension.train_length
    if extension.method != "none":
        # The plan may be made on another machine than the training's, without its kernels.
        request = replace(settings.request(), kernels="auto")
        request_check = check_request(empty_model(extension.model, config), request)
        if request_check.length is not None:
            return request_check.length
    text = original_config(config.get_text_config(decoder=True))
    return next(iter(read_geometries(text, extension.trained_length).values())).trained_length


def _training_setup(
    settings: Any,
    config: Any,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainingSetup:
    extension, training, data = settings.extension, settings.training, settings.data
    variables = os.environ if environment is None else environment
    world = processes or int(variables.get("WORLD_SIZE", "1"))
    sizes = {
        name: int(variables.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))
        for name in ("CP", "SP", "DP_REPLICATE")
    }
    fsdp = variables.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    deepspeed = variables.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    is_sharded = fsdp or (deepspeed and variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3")
    dtype = getattr(torch, extension.dtype)
    compute = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else dtype
    return TrainingSetup(
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
        packed_masks=data.packing == "masked" or data.short_share > 0,
        shards=max(1, world // sizes["DP_REPLICATE"]) if is_sharded else 1,
        context_parallel=sizes["CP"] * sizes["SP"],
        replicated=world > 1 and not is_sharded,
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


def _device_memory(settings: Any) -> int | None:
    """Return the bytes of this process's GPU, or of the machine without one; None if unknown."""
    if torch.cuda.is_available() and not settings.training.use_cpu:
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return torch.cuda.get_device_properties(index).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _suggestions(config: Any, length: int, setup: TrainingSetup, available: int) -> list[str]:
    """Return single settings that make a recipe fit, and its longest row that fits unchanged."""
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
            suggestions.append(f"{name} ({_format_gib(need.total)})")
    if longest := longest_row(config, available, **vars(setup)):
        suggestions.append(f"train_length: {longest} or less")
    for _, name, change in [] if suggestions else [entry for entry in changes if entry[0]]:
        combined, names = replace(combined, **change), [*names, name]
        need = memory_need(config, length=length, **vars(combined))
        if need.total <= usable:
            return [f"{', '.join(names)}, all at once ({_format_gib(need.total)})"]
    return suggestions or ["larger or more devices, or a smaller model"]


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


def _format_tokens(length: int) -> str:
    return f"{length:,}" if length else "–"


if __name__ == "__main__":
    print(lengths_table())
