"""Measure context parallelism in one of several processes that share sequences.

Run as `worker.py FOLDER` with the variables that torchrun sets; writes `FOLDER/RANK.json`, which
test_context_parallel.py checks. One run measures everything, since starting processes is slow.
"""

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import shims
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from helpers.processes import leave_process_group
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TRAINED, make_model, tokens
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import rope_patch
from rope_patch.patching.dynamic import hooks

# Of two processes, one gets both ends of a sequence and the other its middle. At this length only
# the first one has positions beyond the trained length.
LENGTH = 2 * TRAINED
WITHIN_ONE = LENGTH // 4 - 8  # the other process gets padding only

METHODS = {
    "yarn": {"factor": 4},
    "dynamic": {},
    "dynamic-yarn": {},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
}
TRAINING_METHODS = ["dynamic-yarn", "longrope"]


class Reductions:
    """Count the all_reduce calls within the context."""

    def __enter__(self):
        self.count, self.real = 0, dist.all_reduce
        dist.all_reduce = self.reduce
        return self

    def reduce(self, *args, **kwargs):
        self.count += 1
        return self.real(*args, **kwargs)

    def __exit__(self, *_):
        dist.all_reduce = self.real


def make_patched(method):
    model = make_model()
    return model, rope_patch.patch(model, method, **METHODS[method])


def make_batch(lengths=(LENGTH,)):
    """Return right-padded rows of tokens with the inputs that their parts need."""
    positions = torch.arange(LENGTH).repeat(len(lengths), 1)
    return {
        "input_ids": tokens(LENGTH, batch=len(lengths)),
        "position_ids": positions,
        "attention_mask": (positions < torch.tensor(lengths)[:, None]).long(),
    }


def split(batch, context):
    """Reduce the batch to the part of this process by `context`, a context parallelism."""
    buffers = list(batch.values())
    return context(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers}
    )


def torch_context(mesh):
    return lambda **kwargs: context_parallel(mesh, **kwargs)


def no_parallelism(**_):
    return contextlib.nullcontext()


# -- torch's context parallelism -------------------------------------------------------------------


def gather_logits(part, positions):
    """Gather the whole `[1, S, V]` from each process's part at its positions."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    places = [torch.empty_like(positions) for _ in parts]
    dist.all_gather(parts, part.contiguous())
    dist.all_gather(places, positions.contiguous())
    whole = torch.full((1, LENGTH, part.shape[-1]), torch.nan)
    for part, place in zip(parts, places, strict=True):
        whole[:, place[0]] = part
    return whole


@torch.no_grad()
def measure_logits(mesh, method):
    """Return the differences of split from whole logits by source of the length, and reductions."""
    model, handle = make_patched(method)
    whole = model(**make_batch(), use_cache=False).logits
    logits_report = {}
    for source in ("shared", "fixed", "unknown"):
        handle.share_length(mesh.get_group() if source == "shared" else None)
        handle.fix_length(LENGTH if source == "fixed" else None)
        batch = make_batch()
        with split(batch, torch_context(mesh)):
            with Reductions() as reductions:
                part = model(**batch, use_cache=False).logits
            difference = (gather_logits(part, batch["position_ids"]) - whole).abs().max().item()
        logits_report[source] = {"apart": difference, "reductions": reductions.count}
    return logits_report


def measure_positions(mesh):
    """Return the indices of this process's tokens."""
    batch = make_batch()
    with split(batch, torch_context(mesh)):
        return batch["position_ids"][0].tolist()


def error_without_positions(model, context):
    """Return a model's error if its part of the sequence comes without positions."""
    batch = make_batch()
    del batch["position_ids"]
    with split(batch, context):
        try:
            model(**batch, use_cache=False)
        except ValueError as error:
            return str(error)


def measure_missing_positions(mesh):
    model, handle = make_patched("dynamic-yarn")
    handle.share_length(mesh.get_group())
    return error_without_positions(model, torch_context(mesh))


# -- data parallelism ------------------------------------------------------------------------------


def measure_data_parallel():
    """Return the difference of logits under DDP, which broadcasts buffers, from those without.

    Each process has rows of its own, so frequencies of other shapes: by rows or for all of them.
    """
    model, _ = make_patched("dynamic-yarn")
    rows = {0: (30, LENGTH), 1: (LENGTH // 2, LENGTH // 2)}[dist.get_rank()]
    batches = [make_batch(rows), make_batch((20, 25)), make_batch(rows[::-1])]
    alone = [model(**batch, use_cache=False).logits for batch in batches]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    together = [parallel(**batch, use_cache=False).logits for batch in batches]
    return max((a - b).abs().max().item() for a, b in zip(alone, together, strict=True))


# -- accelerate's context parallelism --------------------------------------------------------------


def measure_step(model, backward, context):
    """Return loss and gradient norm of a long and a short row, and the forward's reductions."""
    batch = make_batch((LENGTH, WITHIN_ONE))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    # Shift the labels before the split, as a token's target may be in another part.
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    batch["shift_labels"] = shifted.contiguous()
    targets = (shifted != -100).sum()
    with split(batch, context):
        with Reductions() as reductions:
            loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss
        backward(loss)
    loss = loss.detach().clone()
    if context is not no_parallelism:
        dist.all_reduce(loss)  # each process has the sum over its own targets / all targets
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {"loss": loss.item(), "norm": norm.item(), "reductions": reductions.count}


def measure_training():
    """Return a step of one process, and of all under accelerate without explicit lengths."""
    report = {}
    for method in TRAINING_METHODS:
        model, _ = make_patched(method)
        report[method] = {"whole": measure_step(model, torch.Tensor.backward, no_parallelism)}

    # From here on accelerate's state has split sequences.
    shims.allow_fsdp2_on_cpu()
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=dist.get_world_size()),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )
    context = accelerator.maybe_context_parallel

    def prepare_patched(method):
        model, _ = make_patched(method)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]

    def backward(loss):  # FSDP takes the mean of the gradients, where their sum is meant
        accelerator.backward(loss * dist.get_world_size())

    for method in TRAINING_METHODS:
        report[method]["split"] = measure_step(prepare_patched(method), backward, context)
        with mock.patch.object(hooks, "context_parallel_group", return_value=None):
            report[method]["unknown"] = measure_step(prepare_patched(method), backward, context)
    report["complaint"] = error_without_positions(prepare_patched("dynamic-yarn"), context)
    return report


def main(folder):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),  # a file, as a port may be taken
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    shims.allow_ring_attention_on_cpu()
    mesh = dist.init_device_mesh("cpu", (size,))
    report = {
        "positions": measure_positions(mesh),
        "logits": {method: measure_logits(mesh, method) for method in METHODS},
        "complaint": measure_missing_positions(mesh),
        "data parallel": measure_data_parallel(),
        "training": measure_training(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
