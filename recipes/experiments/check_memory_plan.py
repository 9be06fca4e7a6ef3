"""Planned memory beside what a real step takes on a CPU, where every allocation can be seen.

torch's profiler reports each allocation and release of its CPU allocator, so that the running sum
is exact, other than a process's resident memory. A GPU's allocator rounds and fragments on top of
the same tensors; its attention and its loss in 16 bits have other temporaries than a CPU's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from rope_patch.training import chunked_loss
from rope_patch.training.memory.model import MemoryNeed, TrainingSetup, memory_need
from rope_patch.training.model_setup import add_lora
from rope_patch.training.settings import ExtensionArguments

MIB = 2**20


def llama(
    hidden: int = 512, layers: int = 8, vocab: int = 32000, tied: bool = False, **others: Any
) -> LlamaConfig:
    """A small Llama's config: four query heads for each key head, MLPs three times as wide."""
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
    """SmolLM2-135M's shape."""
    return llama(
        hidden=576,
        layers=30,
        vocab=49152,
        tied=True,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
    )


def measured_peak(config: Any, *, length: int, **how: Any) -> int:
    """Bytes that the second optimizer step of a model with random weights has allocated at most.

    Args:
        config: A causal language model's.
        length: Tokens of a row.
        **how: See `TrainingSetup`; on one device.
    """
    asked = TrainingSetup(**how)
    model = _model(config, asked)
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = asked.optimizer != "adamw_torch"
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=fused, foreach=not fused)
    ids = torch.randint(0, config.vocab_size, (asked.rows, length))
    batch = {"input_ids": ids, "labels": ids}
    if asked.packed_masks:
        batch["position_ids"] = torch.arange(length).remainder(length // 2).expand_as(ids)

    def step() -> None:
        autocast = asked.compute_dtype not in (None, asked.dtype)
        with torch.autocast("cpu", dtype=asked.compute_dtype, enabled=autocast):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's states are made in the first one
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    held = [*model.parameters(), *model.buffers(), *states, *batch.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or some builds of torch report on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return sum(storages.values()) + max(accumulate(event.nbytes() for event in events))


def _model(config: Any, how: TrainingSetup) -> Any:
    torch.manual_seed(0)
    attention = {"attn_implementation": how.attention}
    model = AutoModelForCausalLM.from_config(config, dtype=how.dtype, **attention)
    if how.lora_rank:
        said = ExtensionArguments(
            lora_rank=how.lora_rank,
            lora_targets=list(how.lora_targets),
            lora_trains=list(how.lora_trains),
        )
        asked: Any = SimpleNamespace(extension=said)
        model = add_lora(model, asked)
    chunked_loss.install_loss(model, how.loss)
    if how.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if how.lora_rank and "embeddings" not in how.lora_trains:
            model.enable_input_require_grads()
    return model.train()


def small_cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Names, configs and arguments of `memory_need` that take a few seconds each."""
    few, narrow = llama(layers=4, vocab=8000), llama(layers=4, vocab=2000)
    bf16 = {"compute_dtype": torch.bfloat16, "loss": "full"}
    every = {"checkpointing": False}
    return {
        "checkpointing": (few, {"length": 1024}),
        "all kept": (few, {"length": 512, **every}),
        "two rows, tied": (llama(layers=4, vocab=8000, tied=True), {"length": 256, "rows": 2}),
        "all logits": (few, {"length": 512, "loss": "full"}),
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
    """The same with a vocabulary of 32k and longer rows, minutes in all."""
    model = llama()
    cases: dict[str, tuple[Any, dict[str, Any]]] = {}
    for length in (1024, 4096):
        for loss in ("torch", "full"):
            for kept in (True, False):
                name = f"hidden 512, {length:,} tokens, {loss} loss"
                how = {"length": length, "loss": loss, "checkpointing": kept}
                cases[name if kept else f"{name}, all kept"] = (model, how)
    cases["hidden 512, 4,096 tokens, LoRA"] = (model, {"length": 4096, "lora_rank": 8})
    cases["SmolLM2-135M, 2,048 tokens"] = (smollm2(), {"length": 2048})
    return cases


def compared(cases: dict[str, tuple[Any, dict[str, Any]]]) -> Iterator[tuple[str, MemoryNeed, int]]:
    """What is planned and what is measured, case by case."""
    for name, (config, how) in cases.items():
        yield name, memory_need(config, **how), measured_peak(config, **how)


def check() -> Iterator[str]:
    """A Markdown table's lines of planned and measured peaks."""
    yield "| step on a CPU | planned, MiB | measured, MiB | planned / measured | most in |"
    yield "|---|---|---|---|---|"
    for name, need, peak in compared({**small_cases(), **large_cases()}):
        sizes = f"{need.total / MIB:,.1f} | {peak / MIB:,.1f} | {need.total / peak:.3f}"
        yield f"| {name} | {sizes} | {need.moment} |"


if __name__ == "__main__":
    for line in check():
        print(line, flush=True)
