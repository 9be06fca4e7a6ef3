"""Plan the memory and time of a recipe's training step, from its model's config alone.

In comes a recipe and, for other devices than this process's, a launch file. Out comes a plan, as
text or JSON: bytes per device, the longest rows that fit, and an estimated time. If a step does not
fit, `require_device` raises with single changes that make it fit.

`python -m rope_patch.training.memory.plan --config RECIPE --launch FILE` prints the plan.
`rope_patch.training.memory.model` describes the computation and what of it was never measured
(everything on a GPU); `recipes/experiments/check_memory_plan.py` compares it with the peak of a
step on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rope_patch.entry_points import check as check_request
from rope_patch.original_config import original_config
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import empty_model, read_config
from rope_patch.rope_config import read_geometries
from rope_patch.training.memory.model import (
    RESERVE,
    MemoryNeed,
    ModelShape,
    TrainingSetup,
    host_memory_need,
    longest_row,
    memory_need,
    model_shape,
)
from rope_patch.training.memory.recipe_setup import (
    DEVICE_LAYOUTS,
    DEVICES,
    GIB,
    SHAPES,
    format_gib,
    format_tokens,
    read_environment,
    training_setup,
)
from rope_patch.training.recipe_files import find_launch
from rope_patch.training.settings import parse_settings
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils.errors import Refused

__all__ = [
    "DEVICES",
    "GIB",
    "RESERVE",
    "SHAPES",
    "MemoryNeed",
    "TrainingSetup",
    "format_plan",
    "from_settings",
    "lengths",
    "longest_row",
    "main",
    "memory_need",
    "require_device",
    "require_memory",
    "row_length",
    "target_length",
    "to_dict",
]


def from_settings(
    settings: Any, *, processes: int | None = None, environment: Mapping[str, str] | None = None
) -> MemoryNeed:
    """Return the memory that a recipe needs on each device.

    Args:
        settings: The recipe, from `rope_patch.training.settings.parse_settings`.
        processes: Processes that share the work; None reads `accelerate launch`'s variables.
        environment: Variables set by `accelerate launch`; None reads this process's environment.
    """
    config = _read_config(settings)
    setup = training_setup(settings, config, processes, environment)
    return memory_need(config, length=row_length(settings, config), **vars(setup))


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
    parts = ", ".join(f"{name} {format_gib(size)}" for name, size in need.parts().items() if size)
    advice = suggestions or (
        "gradient_checkpointing: true",
        "loss: torch",
        "offload_activations: true",
        "lora_rank: 8",
        "more GPUs with FSDP",
        "a shorter train_length",
    )
    raise ValueError(
        f"a step needs {format_gib(need.total)} on each device ({parts}; most in: "
        f"{need.moment}), but "
        f"the device has {format_gib(available)}, {format_gib(usable_bytes)} of it to be planned "
        "with; expected one "
        "of: " + "; ".join(advice) + " (ignore_plan: true starts anyway)"
    )


def require_device(settings: Any) -> None:
    """Raise if this process's device is too small for a recipe; see `require_memory`."""
    if (available := _device_memory(settings)) is None:
        return
    config = _read_config(settings)
    setup, length = training_setup(settings, config), row_length(settings, config)
    need = memory_need(config, length=length, **vars(setup))
    short = need.total > available * (1 - RESERVE)
    require_memory(
        need, available, suggest_changes(config, length, setup, available) if short else ()
    )


def to_dict(settings: Any, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a recipe's plan as JSON data, in bytes, tokens and seconds; with stages, each one's.

    Args:
        settings: The recipe, from `rope_patch.training.settings.parse_settings`.
        environment: Variables set by `accelerate launch`; None reads this process's environment.
    """
    environment = os.environ if environment is None else environment
    if settings.stages:
        return {"stages": [to_dict(stage, environment) for stage in settings.stages]}
    config = _read_config(settings)
    setup = training_setup(settings, config, environment=environment)
    length, training = row_length(settings, config), settings.training
    need = memory_need(config, length=length, **vars(setup))
    world = int(environment.get("WORLD_SIZE", "1"))
    rows = (
        setup.rows * training.gradient_accumulation_steps * max(1, world // setup.context_parallel)
    )
    tokens = settings.extension.tokens
    work = step_work(
        config,
        length=length,
        rows=rows,
        checkpointing=setup.checkpointing,
        trains_all=setup.lora_rank == 0,
    )
    steps = training.max_steps if tokens is None else -(-int(tokens) // (rows * length))
    return {
        "model": settings.extension.model,
        "length": length,
        "processes": world,
        "shards": setup.shards,
        "context_parallel": setup.context_parallel,
        "context_kind": setup.context_kind if setup.context_parallel > 1 else None,
        "loss": setup.loss,
        "need": {**need.parts(), "total": need.total},
        "moment": need.moment,
        "host": host_memory_need(config, length=length, **vars(setup)),
        "operations_per_step": work.total,
        "seconds_per_step": {"H100": work.seconds(world), "utilisation": UTILISATION},
        "steps": steps,
        "tokens_per_step": rows * length,
        "tokens": steps * rows * length,
        "reserve": RESERVE,
        "packing_window": settings.data.window_bytes(length),
        "longest": {
            spread: {
                name: longest_row(config, size, **vars(replace(setup, **split)))
                for name, size in DEVICES.items()
            }
            for spread, split in (DEVICE_LAYOUTS if world == 1 else {"as it is": {}}).items()
        },
    }


@takes_remote_code
def format_plan(
    settings: Any, as_json: bool = False, environment: Mapping[str, str] | None = None
) -> str:
    """Return a recipe's plan as text or JSON; see `to_dict`."""
    if as_json:
        return json.dumps(to_dict(settings, environment), indent=2)
    if settings.stages:
        plans = []
        for stage in settings.stages:
            with stage.stage.naming_errors():
                plans.append(
                    f"stage {stage.stage.number}, {format_plan(stage, environment=environment)}"
                )
        return "\n\n".join(plans)
    numbers = to_dict(settings, environment)
    spread = f"{numbers['processes']} process{'es' if numbers['processes'] > 1 else ''}"
    if numbers["shards"] > 1:
        spread += f", weights in {numbers['shards']} shards"
    if numbers["context_parallel"] > 1:
        spread += f", rows in {numbers['context_parallel']} parts ({numbers['context_kind']})"
    lines = [
        f"{numbers['model']}: rows of {numbers['length']:,} tokens, {spread}",
        f"{numbers['steps']:,} steps of {numbers['tokens_per_step']:,} tokens: "
        f"{numbers['tokens']:,} in all",
        "",
        f"memory on each device, in the moment that needs most ({numbers['moment']}):",
    ]
    lines += [f"  {name:<12}{format_gib(size):>14}" for name, size in numbers["need"].items()]
    if numbers["host"]:
        lines.append(f"  {'in CPU memory':<14}{format_gib(numbers['host']):>12} per device")
    if window := numbers["packing_window"]:
        lines += ["", f"documents of a packing window, in each process: {format_gib(window)}"]
    seconds = numbers["seconds_per_step"]["H100"]
    lines += [
        "",
        f"estimated time of a step: {seconds:,.1f} s, if H100s reach {UTILISATION:.0%} of their "
        f"peak; {seconds * numbers['steps'] / 3600:,.1f} h in all",
    ]
    lines += ["", f"longest rows that fit, {RESERVE:.0%} of a device left free:"]
    for spread, longest in numbers["longest"].items():
        fitting = "".join(
            f"{name:>8}{format_tokens(tokens):>12}" for name, tokens in longest.items()
        )
        lines.append(f"  {spread:<28}{fitting}")
    lines.append("planned from the config alone; checked on CPUs, never on a GPU")
    return "\n".join(lines)


def _read_config(settings: Any) -> Any:
    """Return the config of a recipe's model; raise if it does not rotate."""
    name = settings.extension.model
    config = read_config(demo.resolve_model_path(name))
    text = config.get_text_config(decoder=True)
    # Documents packed in a row would share the positions of a model that does not rotate.
    if not getattr(text, "rope_parameters", None):
        raise Refused(
            f"recipes train models that rotate, and {name} ({text.model_type}) does not: train the "
            "extended model of rope_patch.load with transformers' Trainer, and write it with "
            "rope_patch.save, which keeps a trained table"
        )
    return config


def row_length(settings: Any, config: Any | None = None) -> int:
    """Return the tokens per row that `model_setup.prepare_model` will use."""
    if settings.extension.train_length is not None:
        return settings.extension.train_length
    config = _read_config(settings) if config is None else config
    length = target_length(settings, config)
    return _trained_length(settings, config) if length is None else length


def target_length(settings: Any, config: Any | None = None) -> int | None:
    """Return the length in tokens that a recipe extends to; None for a method without a length.

    Args:
        settings: The recipe.
        config: The config of its model; None reads it.

    Raises:
        ValueError: The recipe does not fit the model.
    """
    extension = settings.extension
    config = _read_config(settings) if config is None else config
    if extension.method != "none":
        # The plan may be made on another machine than the training's, without its kernels.
        request = replace(settings.request(), kernels="auto")
        request_check = check_request(empty_model(extension.model, config), request)
        return request_check.length
    trained_length = _trained_length(settings, config)
    if settings.data.positions == "leaky":
        return settings.leaky_target(trained_length)
    return trained_length


def _trained_length(settings: Any, config: Any) -> int:
    named, start = settings.extension.trained_length, settings.extension.start
    text = original_config(config.get_text_config(decoder=True), start, named)
    geometries = read_geometries(text, named, start)
    return next(iter(geometries.values())).trained_length


def lengths(settings: Any) -> tuple[int, int, int]:
    """Return a recipe's trained length, target length and row length in tokens.

    The target length of a method that follows every length is the trained one.

    Raises:
        ValueError: The recipe does not fit the model.
    """
    config = _read_config(settings)
    trained = _trained_length(settings, config)
    target = target_length(settings, config)
    return trained, trained if target is None else target, row_length(settings, config)


def _device_memory(settings: Any) -> int | None:
    """Return the bytes of this process's GPU, or of the machine without one; None if unknown."""
    if torch.cuda.is_available() and not settings.training.use_cpu:
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return torch.cuda.get_device_properties(index).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


# A step's time counts its floating point operations alone: no communication, no copies to the CPU,
# no optimizer step. This share stands for all of them; it is stated, nothing was measured.
UTILISATION = 0.5  # of the peak, recomputed layers counted
# Dense bf16 operations per second, from the makers' data sheets (without sparsity).
PEAKS = {
    "RTX 4090": 165.2e12,
    "A100": 312e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "B200": 2250e12,
}


@dataclass(frozen=True)
class StepWork:
    """Floating point operations of one optimizer step, over all devices.

    Attributes:
        linear: Operations of linear layers and the head, recomputed ones included.
        attention: Operations between pairs of tokens, recomputed ones included.
        model: Operations of both without recomputation, with attention's backward pass at twice
            its forward pass: what published "model FLOPs" count.
    """

    linear: float
    attention: float
    model: float

    @property
    def total(self) -> float:
        """Return the operations that devices execute."""
        return self.linear + self.attention

    def seconds(
        self, devices: int, peak: float = PEAKS["H100"], utilisation: float = UTILISATION
    ) -> float:
        """Return the estimated time of the step.

        Args:
            devices: Devices that share the step evenly.
            peak: Operations per second of one device.
            utilisation: Share of the peak that is reached, between 0 and 1.

        Raises:
            ValueError: A number is outside its range.
        """
        if devices < 1 or peak <= 0 or not 0 < utilisation <= 1:
            raise ValueError(
                "expected at least 1 device, a peak above 0 and a utilisation above 0 and at most "
                f"1, got {devices}, {peak} and {utilisation}"
            )
        return self.total / (devices * peak * utilisation)


def step_work(
    config: Any, *, length: int, rows: int, checkpointing: bool = True, trains_all: bool = True
) -> StepWork:
    """Return the operations of a step.

    Args:
        config: Config of a causal language model.
        length: Tokens per row; each sees all tokens before it, or those of its layer's window.
        rows: Rows of the step, over all devices and accumulated batches.
        checkpointing: Whether layers are computed once more in the backward pass.
        trains_all: Whether all weights have gradients, which LoRA's frozen ones do not.
    """
    if length < 1 or rows < 1:
        raise ValueError(f"length and rows must be at least 1, got {length} and {rows}")
    # Linear layers and the head cost 2 operations per weight and token, attention 4 per pair of
    # tokens and number of its query. A backward pass costs twice the forward pass, and 2.5 times in
    # attention, which recomputes its scores (FlashAttention's).
    shape = model_shape(config)
    # Only the experts that a token passes through count.
    weights = min(
        shape.matrix_weights_per_layer,
        shape.hidden * (3 * shape.mlp + 2 * shape.query + 2 * shape.key),
    )
    operations = 2.0 * rows * length  # per weight
    layers = operations * shape.layers * weights
    head = operations * shape.embedding_weights
    # torch stops to recompute a layer before its last product, which nothing needs.
    recomputed = layers - operations * shape.layers * shape.hidden * shape.mlp
    attention = 4.0 * rows * shape.query * _attended_pairs(config, shape, length)
    backward = 2 if trains_all else 1
    linear = (layers + head) * (1 + backward) + checkpointing * recomputed
    return StepWork(
        linear=linear,
        attention=attention * (1 + 2.5 + checkpointing),
        model=(layers + head) * (1 + backward) + attention * 3,
    )


def _attended_pairs(config: Any, shape: ModelShape, length: int) -> float:
    """Return the pairs of tokens that attention compares in one row, over all layers."""
    text = config.get_text_config(decoder=True)
    causal = length * (length + 1) / 2
    types = getattr(text, "layer_types", None) or ["full_attention"] * shape.layers
    window = getattr(text, "sliding_window", None) or length
    beyond = max(0, length - window)
    windowed = causal - beyond * (beyond + 1) / 2
    pairs = {"full_attention": causal, "sliding_attention": windowed, "chunked_attention": windowed}
    # Recurrent layers compare no pairs; their own work is within their weights'.
    return sum(pairs.get(kind, 0.0) for kind in types)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan of a recipe on the devices of a launch file."""
    parser = argparse.ArgumentParser(
        prog="python -m rope_patch.training.memory.plan",
        description="Print the plan of a recipe on the devices of a launch file.",
        epilog="All other arguments are a recipe's: --config NAME, --KEY VALUE, --json.",
        allow_abbrev=False,
    )
    parser.add_argument("--launch", type=Path, help="accelerate's file, or a name of the package's")
    parser.add_argument("--processes", type=int, help="number of processes, instead of the file's")
    options, rest = parser.parse_known_args(arguments)
    if not rest:
        parser.error("expected a recipe to plan: --config NAME; got none")
    try:
        settings, flags = parse_settings(rest)
        environment = None
        if options.launch is not None:
            environment = read_environment(find_launch(options.launch), options.processes)
        page = format_plan(settings, as_json=flags.json, environment=environment)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(page)


if __name__ == "__main__":
    main()
