"""Compare planned memory with the peak of a real step on a CPU.

torch's profiler reports each allocation and release of the CPU allocator, so the running sum is
exact, unlike a process's resident memory. A GPU's allocator rounds and fragments on top of the same
tensors; its attention and its loss in 16 bits have other temporaries than a CPU's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from rope_patch.training.memory.model import MemoryNeed, TrainingSetup, memory_need
from rope_patch.training.model_setup import add_lora
from rope_patch.training.objective import chunked_loss
from rope_patch.training.objective.chunk_sums import ZLoss
from rope_patch.training.objective.chunked_loss import Objective
from rope_patch.training.objective.distillation import (
    DISTILLED,
    Distillation,
    Teacher,
    share_weights,
)
from rope_patch.training.settings import ExtensionArguments

MIB = 2**20


def llama(
    hidden: int = 512, layers: int = 8, vocab: int = 32000, tied: bool = False, **others: Any
) -> LlamaConfig:
    """Return a small Llama's config: four query heads per key head, MLPs three times as wide."""
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 8192,
        **others,
    }
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        **sizes,
    )


def smollm2() -> LlamaConfig:
    """Return a config of SmolLM2-135M's shape."""
    return llama(
        hidden=576,
        layers=30,
        vocab=49152,
        tied=True,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
    )


def measured_peak(config: Any, *, length: int, **setup_fields: Any) -> int:
    """Return the peak bytes of a random model's second optimizer step.

    Args:
        config: Config of a causal language model.
        length: Tokens per row.
        **setup_fields: See `TrainingSetup`; on one device.
    """
    setup = TrainingSetup(**setup_fields)
    model, objective = _model(config, setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = setup.optimizer != "adamw_torch"
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=fused, foreach=not fused)
    ids = torch.randint(0, config.vocab_size, (setup.rows, length))
    batch = {"input_ids": ids, "labels": ids}
    if setup.packed_masks:
        batch["position_ids"] = torch.arange(length).remainder(length // 2).expand_as(ids)
    if setup.distils:
        batch["position_ids"] = batch.get("position_ids", torch.arange(length).expand_as(ids))
    autocast = setup.compute_dtype not in (None, setup.dtype)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        autocast=lambda: torch.autocast("cpu", dtype=setup.compute_dtype, enabled=autocast),
    )
    original: Any = None
    if (distillation := objective.distillation) is not None:
        distillation.to_device(accelerator)
        original = distillation.teacher.model

    def teacher_forward() -> Any:
        if distillation is None:
            return contextlib.nullcontext()
        flags = torch.ones(setup.rows, dtype=torch.bool)
        return distillation.teacher_forward(batch | {DISTILLED: flags})

    def step() -> None:
        with accelerator.autocast(), teacher_forward():
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first step creates the optimizer's states
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    tensors = [*model.parameters(), *model.buffers(), *states, *batch.values()]
    if original is not None:
        tensors += [*original.parameters(), *original.buffers()]
    return peak_of(step, tensors)


def peak_of(step: Callable[[], object], tensors: Iterable[Any]) -> int:
    """Return the peak bytes of this process while it runs a step.

    Args:
        step: Frees everything that it allocates.
        tensors: What exists before the step; of sharded tensors, this process's part counts.
    """
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else some builds of torch log to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return sum(storages.values()) + max(accumulate(event.nbytes() for event in events))


def _model(config: Any, setup: TrainingSetup) -> tuple[Any, Objective]:
    torch.manual_seed(0)
    attention = {"attn_implementation": setup.attention}
    model = AutoModelForCausalLM.from_config(config, dtype=setup.dtype, **attention)
    distillation = None
    if setup.distils:
        dtype = setup.teacher_dtype or setup.dtype
        original = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
        if setup.teacher_dtype is None:
            share_weights(original, dict(model.named_parameters(remove_duplicate=False)))
        distillation = Distillation(Teacher(original), 1.0, 1.0)
    if setup.lora_rank:
        extension = ExtensionArguments(
            lora_rank=setup.lora_rank,
            lora_targets=list(setup.lora_targets),
            lora_trains=list(setup.lora_trains),
        )
        settings: Any = SimpleNamespace(extension=extension)
        model = add_lora(model, settings)
    objective = Objective([ZLoss(1e-5)] if setup.loss_terms else [], distillation)
    chunked_loss.install_loss(model, setup.loss, objective)
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.lora_rank and "embeddings" not in setup.lora_trains:
            model.enable_input_require_grads()
    return model.train(), objective


def small_cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return cases that take a few seconds each: config and arguments of `memory_need` by name."""
    few, narrow = llama(layers=4, vocab=8000), llama(layers=4, vocab=2000)
    bf16 = {"compute_dtype": torch.bfloat16, "loss": "full"}
    every = {"checkpointing": False}
    return {
        "checkpointing": (few, {"length": 1024}),
        "all kept": (few, {"length": 512, **every}),
        "two rows, tied": (llama(layers=4, vocab=8000, tied=True), {"length": 256, "rows": 2}),
        "all logits": (few, {"length": 512, "loss": "full"}),
        "z-loss": (few, {"length": 1024, "loss_terms": True}),
        "z-loss, all logits": (
            llama(layers=1, vocab=4000),
            {"length": 2048, "loss": "full", "loss_terms": True},
        ),
        "z-loss, autocast": (
            few,
            {"length": 1024, "loss_terms": True, "compute_dtype": torch.bfloat16},
        ),
        "z-loss, LoRA": (few, {"length": 1024, "loss_terms": True, "lora_rank": 8}),
        "distilled": (few, {"length": 1024, "distils": True, "teacher_dtype": torch.float32}),
        "distilled, tied, all kept": (
            llama(layers=4, vocab=8000, tied=True),
            {"length": 512, "distils": True, "teacher_dtype": torch.float32, **every},
        ),
        "distilled, autocast": (
            few,
            {
                "length": 1024,
                "distils": True,
                "compute_dtype": torch.bfloat16,
                "teacher_dtype": torch.bfloat16,
            },
        ),
        "distilled, LoRA": (few, {"length": 1024, "distils": True, "lora_rank": 8}),
        "LoRA": (few, {"length": 512, "lora_rank": 8}),
        "LoRA, tied": (llama(layers=4, vocab=8000, tied=True), {"length": 512, "lora_rank": 8}),
        "LoRA, all kept": (few, {"length": 512, "lora_rank": 8, **every}),
        "LoRA alone": (few, {"length": 512, "lora_rank": 8, "lora_trains": ()}),
        "LoRA, bf16": (
            narrow,
            {"length": 512, "lora_rank": 8, "dtype": torch.bfloat16, "loss": "full", **every},
        ),
        "autocast": (narrow, {"length": 512, **bf16}),
        "autocast, all kept": (narrow, {"length": 512, **bf16, **every}),
        "bf16": (narrow, {"length": 512, "dtype": torch.bfloat16, "loss": "full"}),
        "masked": (narrow, {"length": 1024, "packed_masks": True}),
        "masked, all kept": (narrow, {"length": 1024, "packed_masks": True, **every}),
        "eager": (narrow, {"length": 512, "attention": "eager"}),
        "AdamW not fused": (few, {"length": 256, "optimizer": "adamw_torch"}),
    }


def large_cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return cases with a vocabulary of 32k and longer rows, minutes in all."""
    model = llama()
    cases: dict[str, tuple[Any, dict[str, Any]]] = {}
    for length in (1024, 4096):
        for loss in ("torch", "full"):
            for checkpointing in (True, False):
                name = f"hidden 512, {length:,} tokens, {loss} loss"
                arguments = {"length": length, "loss": loss, "checkpointing": checkpointing}
                cases[name if checkpointing else f"{name}, all kept"] = (model, arguments)
    cases["hidden 512, 4,096 tokens, LoRA"] = (model, {"length": 4096, "lora_rank": 8})
    cases["SmolLM2-135M, 2,048 tokens"] = (smollm2(), {"length": 2048})
    return cases


def compare_cases(
    cases: dict[str, tuple[Any, dict[str, Any]]],
) -> Iterator[tuple[str, MemoryNeed, int]]:
    """Yield the name, the planned need and the measured peak of each case."""
    for name, (config, arguments) in cases.items():
        yield name, memory_need(config, **arguments), measured_peak(config, **arguments)


def check() -> Iterator[str]:
    """Yield the lines of a Markdown table of planned and measured peaks."""
    yield "| step on a CPU | planned, MiB | measured, MiB | planned / measured | most in |"
    yield "|---|---|---|---|---|"
    for name, need, peak in compare_cases({**small_cases(), **large_cases()}):
        sizes = f"{need.total / MIB:,.1f} | {peak / MIB:,.1f} | {need.total / peak:.3f}"
        yield f"| {name} | {sizes} | {need.moment} |"


if __name__ == "__main__":
    for line in check():
        print(line, flush=True)
