"""Print recipes/README.md's tables of memory: `python recipes/experiments/memory_tables.py`.

They have the longest rows of two models; with `--million` an 8B at up to a million tokens, and
published numbers beside planned ones. Nothing here was measured by this project.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from rope_patch.pretrained.loading import read_config
from rope_patch.training.memory.model import RESERVE, host_memory_need, longest_row, memory_need
from rope_patch.training.memory.plan import step_work
from rope_patch.training.memory.recipe_setup import (
    DEVICE_LAYOUTS,
    DEVICES,
    GIB,
    SHAPES,
    format_tokens,
)

_MODELS = {"1B": "llama-3.2-1b", "8B": "llama-3.1-8b"}
_TRAINING_MODES: dict[str, dict[str, Any]] = {
    "all weights, float32, bf16 products": {"compute_dtype": torch.bfloat16},
    "all weights, bf16": {"dtype": torch.bfloat16},
    "LoRA 8, embeddings, norms": {"compute_dtype": torch.bfloat16, "lora_rank": 8},
}
_LONG_MODELS = {"Qwen3-8B": "qwen3-8b", "Llama-3.1-8B": "llama-3.1-8b"}
_LONG_LENGTHS = (2**17, 2**19, 2**20)
_LONG_DEVICES = (8, 64)
_MOST_HEADS = 32  # of both models: Ulysses shares a row among no more devices
# Sizes of other models of the same architecture, for published measurements.
_SIZES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {},
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {},
}
_TRL = "[TRL](https://huggingface.co/docs/trl/long_context_training)"
_OFFLOAD = "[accelerate#4175](https://github.com/huggingface/accelerate/pull/4175)"
_FIRST = "[trl#6845](https://github.com/huggingface/trl/pull/6845)"
_ALST = (
    "[ALST](https://github.com/snowflakedb/ArcticTraining/tree/main/projects/sequence-parallelism)"
)


@dataclass(frozen=True)
class PublishedRun:
    """A published run on H100s of 80 GB, and how to plan it.

    Attributes:
        model: A key of `_SIZES`.
        source: Where it was published, as Markdown.
        published: What was published, as text.
        devices: Its GPUs.
        length: Tokens of its rows; None if the longest row was published.
        quantity: memory, time or length.
        setup: What differs from `_long_setup`.
    """

    model: str
    source: str
    published: str
    devices: int
    length: int | None
    quantity: str
    setup: dict[str, Any]

    def planned(self) -> float:
        """Return GiB on a device, seconds of a step, or tokens of the longest row."""
        config = _sized_config(self.model)
        setup = _long_setup("allgather", self.devices) | self.setup
        if self.length is None:
            return longest_row(config, DEVICES["80 GB"], **setup)
        if self.quantity == "time":
            return step_work(config, length=self.length, rows=1).seconds(self.devices)
        return memory_need(config, length=self.length, **setup).total / GIB


_OFFLOADED = {"offload_activations": True}
_ULYSSES = {
    "context_kind": "ulysses",
    "loss": "liger",
    "offload_optimizer": True,
    "attention": "flash_attention_2",
}
PUBLISHED = (
    PublishedRun("Qwen3-8B", _TRL, "56.2 GB", 8, 2**20, "memory", _OFFLOADED),
    PublishedRun("Qwen3-8B", _TRL, "380 s", 8, 2**20, "time", {}),
    PublishedRun("Qwen3-8B", _FIRST, "696 s", 16, 2**21, "time", {}),
    PublishedRun("Qwen3-8B", _FIRST, "1,346 s", 32, 2**22, "time", {}),
    PublishedRun("Qwen3-0.6B", _OFFLOAD, "27.9 GB", 8, 2**20, "memory", {}),
    PublishedRun("Qwen3-0.6B", _OFFLOAD, "20.8 GB", 8, 2**20, "memory", _OFFLOADED),
    PublishedRun(
        "Llama-3.1-8B",
        _ALST,
        "160,000 tokens",
        8,
        None,
        "length",
        _ULYSSES | {"context_parallel": 1},
    ),
    PublishedRun("Llama-3.1-8B", _ALST, "1,100,000 tokens", 8, None, "length", _ULYSSES),
    PublishedRun(
        "Llama-3.1-8B", _ALST, "2,400,000 tokens", 8, None, "length", _ULYSSES | _OFFLOADED
    ),
)


def lengths_table() -> str:
    """Return the longest rows of two models on three devices, as Markdown."""
    lines = ["| model | trained | GPUs | " + " | ".join(DEVICES) + " |"]
    lines.append("|---" * 3 + "|---:" * len(DEVICES) + "|")
    for model, folder in _MODELS.items():
        config = read_config(SHAPES / folder)
        for mode, setup in _TRAINING_MODES.items():
            for spread, layout in DEVICE_LAYOUTS.items():
                lengths = [
                    format_tokens(longest_row(config, size, **setup, **layout))
                    for size in DEVICES.values()
                ]
                lines.append(f"| {model} | {mode} | {spread} | " + " | ".join(lengths) + " |")
    return "\n".join(lines)


def million_table() -> str:
    """Return memory and time of a step of two 8B models on 8 and 64 GPUs, as Markdown.

    All weights are trained: float32 weights in shards, bf16 products, checkpointed layers, torch's
    chunked loss. Numbers in brackets do not fit into 80 GB.
    """
    kinds = ("allgather", "ring", "ulysses")
    lines = [
        "| model | tokens | GPUs | " + " | ".join(kinds) + " | "
        "offloaded: " + " | ".join(kinds) + " | CPU memory | s a step |",
        "|---|--:|--:" + "|--:" * (2 * len(kinds) + 2) + "|",
    ]
    for model, folder in _LONG_MODELS.items():
        config = read_config(SHAPES / folder)
        for length in _LONG_LENGTHS:
            for devices in _LONG_DEVICES:
                cells = [model, f"{length:,}", str(devices)]
                for offload in (False, True):
                    for kind in kinds:
                        setup = _long_setup(kind, devices) | {"offload_activations": offload}
                        cells.append(_bracketed(memory_need(config, length=length, **setup).total))
                ring = _long_setup("ring", devices) | {"offload_activations": True}
                cells.append(f"{host_memory_need(config, length=length, **ring) / GIB:,.1f}")
                cells.append(f"{step_work(config, length=length, rows=1).seconds(devices):,.0f}")
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def published_table() -> str:
    """Return published measurements beside what is planned for them, as Markdown."""
    lines = ["| model | GPUs | tokens | rows shared | activations | published | planned |"]
    lines.append("|---|--:|--:|---|---|--:|--:|")
    for run in PUBLISHED:
        setup = _long_setup("allgather", run.devices) | run.setup
        shared = setup["context_kind"] if setup["context_parallel"] > 1 else "no"
        kept = "offloaded" if setup.get("offload_activations") else "kept"
        if run.quantity == "time":
            kept = ""
        length = "the longest" if run.length is None else f"{run.length:,}"
        number = run.planned()
        planned = {
            "memory": f"{number:,.1f} GiB",
            "time": f"{number:,.0f} s",
            "length": f"{number:,.0f} tokens",
        }[run.quantity]
        lines.append(
            f"| {run.model} | {run.devices} | {length} | {shared} | {kept} | "
            f"{run.published}, {run.source} | {planned} |"
        )
    return "\n".join(lines)


def _sized_config(model: str) -> Any:
    config = read_config(SHAPES / ("qwen3-8b" if model.startswith("Qwen3") else "llama-3.1-8b"))
    for name, value in _SIZES[model].items():
        setattr(config, name, value)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = layer_types[: config.num_hidden_layers]
    return config


def _long_setup(kind: str, devices: int) -> dict[str, Any]:
    parts = min(devices, _MOST_HEADS) if kind == "ulysses" else devices
    return {
        "compute_dtype": torch.bfloat16,
        "shards": devices,
        "context_parallel": parts,
        "context_kind": kind,
    }


def _bracketed(size: int) -> str:
    fits = size <= DEVICES["80 GB"] * (1 - RESERVE)
    number = f"{size / GIB:,.1f}"
    return number if fits else f"({number})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print tables of memory plans as Markdown.")
    parser.add_argument("--million", action="store_true", help="an 8B at up to a million tokens")
    is_million = parser.parse_args().million
    tables = (million_table(), published_table()) if is_million else (lengths_table(),)
    print("\n\n".join(tables))
