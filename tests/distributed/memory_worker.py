"""Measure the peak memory of a training step in one of several processes that share a row.

Run as `memory_worker.py FOLDER GROUP` with the variables that torchrun sets; writes
`FOLDER/RANK.json`, which test_planned_memory.py checks. Weights are shared by FSDP2, rows by
torch's ring attention or by the exchange of heads (Ulysses), which is written out here: DeepSpeed's
runs on GPUs only.
"""

import json
import sys
from pathlib import Path

import check_memory_plan
import shims
import torch
import torch.distributed as dist
from accelerate.utils import (
    TorchContextParallelConfig,
)
from helpers.processes import leave_process_group
from shims import RANK, SIZE
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM

from rope_patch.training import install_loss

IGNORED = -100
CONFIG = {"hidden": 256, "layers": 2, "vocab": 500}
NARROW = {"intermediate_size": 64}  # so that attention needs most, not the MLP
MANY = NARROW | {"num_key_value_heads": 8}
ONE = NARROW | {"num_key_value_heads": 1}
# Group -> name -> (kind, tokens of a row, sizes of the model that differ).
CASES = {
    "few": {
        "allgather": ("allgather", 2048, NARROW),
        "ring": ("ring", 2048, NARROW),
        "ulysses": ("ulysses", 2048, NARROW),
    },
    "others": {
        "whole rows": (None, 1024, {}),
        "long allgather": ("allgather", 4096, NARROW),
        "long ring": ("ring", 4096, NARROW),
        "long ulysses": ("ulysses", 4096, NARROW),
        "allgather, many key heads": ("allgather", 4096, MANY),
        "ring, many key heads": ("ring", 4096, MANY),
        "ulysses, one key head": ("ulysses", 4096, ONE),
        "ring, wide MLP": ("ring", 2048, {}),
    },
}


class ExchangeHeads(torch.autograd.Function):
    """Turn a part of the tokens of all heads, `[B, H, S / P, D]`, into all tokens of a part."""

    @staticmethod
    def forward(ctx, states):
        return to_whole_rows(states)

    @staticmethod
    def backward(ctx, gradient):
        return to_whole_heads(gradient)


class ExchangeTokens(torch.autograd.Function):
    """Turn all tokens of a part of the heads, `[B, H / P, S, D]`, into a part of all heads'."""

    @staticmethod
    def forward(ctx, states):
        return to_whole_heads(states)

    @staticmethod
    def backward(ctx, gradient):
        return to_whole_rows(gradient)


def to_whole_rows(states):
    received = exchange(torch.stack(states.chunk(SIZE, dim=1)))
    return torch.cat(tuple(received), dim=2)


def to_whole_heads(states):
    received = exchange(torch.stack(states.chunk(SIZE, dim=2)))
    return torch.cat(tuple(received), dim=1)


def exchange(parts):
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def attend_ulysses(module, query, key, value, attention_mask, scaling=None, **_):
    """Attend as DeepSpeed's Ulysses does: key heads are copied where there are too few."""
    copies = max(1, SIZE // key.shape[1])
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    query, key, value = (ExchangeHeads.apply(states) for states in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )
    return ExchangeTokens.apply(output).transpose(1, 2).contiguous(), None


def make_model(config, attention="sdpa"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def make_batch(config, length):
    ids = torch.randint(
        0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1)
    )
    return {
        "input_ids": ids,
        "position_ids": torch.arange(length)[None].contiguous(),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
        "shift_labels": functional.pad(ids, (0, 1), value=IGNORED)[:, 1:].contiguous(),
    }


def make_accelerator(kind):
    if kind not in ("allgather", "ring"):
        return shims.share(dp_shard_size=SIZE)
    strategy = {"allgather": "allgather", "ring": "alltoall"}[kind]
    handler = TorchContextParallelConfig(cp_comm_strategy=strategy)
    return shims.share(cp_size=SIZE, cp_handler=handler)


def measure(kind, length, sizes):
    """Return the loss of the first step, and the peak bytes of this process in later ones."""
    config = check_memory_plan.llama(**CONFIG, **sizes)
    accelerator = make_accelerator(kind)
    model = make_model(config, "ulysses" if kind == "ulysses" else "sdpa")
    install_loss(model, "torch")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    batch = make_batch(config, length)
    targets = length - 1
    if kind == "ulysses":
        batch = {name: part.chunk(SIZE, dim=1)[RANK].clone() for name, part in batch.items()}
    losses = []

    def step():
        buffers = [tensor.clone() for tensor in batch.values()]
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            inputs = dict(zip(batch, buffers, strict=True))
            loss = model(**inputs, num_items_in_batch=targets, use_cache=False).loss
            accelerator.backward(loss * SIZE)
        losses.append(loss.detach())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first step creates the optimizer's states
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    tensors = [*model.parameters(), *model.buffers(), *states, *batch.values()]
    # gloo's threads free some buffers late, in some steps, so the smallest of five peaks counts.
    peak = min(check_memory_plan.peak_of(step, tensors) for _ in range(5))
    first = losses[0].clone()
    if kind is not None:
        dist.all_reduce(first)
    return {"loss": first.item(), "peak": peak}


def whole_loss(length, sizes):
    """Return the loss of one process that has the whole row."""
    config = check_memory_plan.llama(**CONFIG, **sizes)
    batch = make_batch(config, length)
    with torch.no_grad():
        return make_model(config)(**batch, num_items_in_batch=length - 1).loss.item()


def main(folder, group):
    shims.join(folder)
    shims.allow_ring_attention_on_cpu()
    AttentionInterface.register("ulysses", attend_ulysses)
    report = {
        name: measure(*case) | {"whole": whole_loss(case[1], case[2])}
        for name, case in CASES[group].items()
    }
    (folder / f"{RANK}.json").write_text(json.dumps(report))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
