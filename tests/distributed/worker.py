"""One of the processes that share sequences: measures, and writes down what it found.

Run as `worker.py FOLDER` with the variables that torchrun sets; leaves `FOLDER/RANK.json`. It is
all measured in one go, since starting processes takes longest; what must hold is said in
test_context_parallel.py.
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
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TRAINED, make_model, tokens
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import rope_patch
from rope_patch.patching.dynamic import hooks

# Of two processes, one gets both ends of a sequence and the other its middle: at this length the
# one sees more than the trained length and the other does not, unless it is told.
LENGTH = 2 * TRAINED
WITHIN_ONE = LENGTH // 4 - 8  # so few tokens that the other process gets padding only

METHODS = {
    "yarn": {"factor": 4},
    "dynamic": {},
    "dynamic-yarn": {},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
}
TRAINED_WITH = ["dynamic-yarn", "longrope"]


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


def split(batch, into):
    """Reduce the batch to this process's part within `into`, a context parallelism."""
    buffers = list(batch.values())
    return into(buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers})


def by_torch(mesh):
    return lambda **kwargs: context_parallel(mesh, **kwargs)


def not_at_all(**_):
    return contextlib.nullcontext()


# -- torch's context parallelism -------------------------------------------------------------------


def gathered(part, positions):
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
    found = {}
    for how in ("shared", "fixed", "unknown"):
        handle.share_length(mesh.get_group() if how == "shared" else None)
        handle.fix_length(LENGTH if how == "fixed" else None)
        batch = make_batch()
        with split(batch, by_torch(mesh)):
            with Reductions() as reductions:
                part = model(**batch, use_cache=False).logits
            apart = (gathered(part, batch["position_ids"]) - whole).abs().max().item()
        found[how] = {"apart": apart, "reductions": reductions.count}
    return found


def measure_positions(mesh):
    """Return the indices of this process's tokens."""
    batch = make_batch()
    with split(batch, by_torch(mesh)):
        return batch["position_ids"][0].tolist()


def complaint(model, into):
    """Return a model's error if its part of the sequence comes without positions."""
    batch = make_batch()
    del batch["position_ids"]
    with split(batch, into):
        try:
            model(**batch, use_cache=False)
        except ValueError as error:
            return str(error)


def measure_complaint(mesh):
    model, handle = make_patched("dynamic-yarn")
    handle.share_length(mesh.get_group())
    return complaint(model, by_torch(mesh))


# -- data parallelism ------------------------------------------------------------------------------


def measure_rows_of_ones_own():
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


# -- accelerate's ----------------------------------------------------------------------------------


def measure_step(model, backward, into):
    """Return loss and gradient norm of a long and a short row, and the forward's reductions."""
    batch = make_batch((LENGTH, WITHIN_ONE))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    # A token's target may be in another part, so it is put beside it while all are here.
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    batch["shift_labels"] = shifted.contiguous()
    targets = (shifted != -100).sum()
    with split(batch, into):
        with Reductions() as reductions:
            loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss
        backward(loss)
    loss = loss.detach().clone()
    if into is not not_at_all:
        dist.all_reduce(loss)  # each process has the sum over its own targets / all targets
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {"loss": loss.item(), "norm": norm.item(), "reductions": reductions.count}


def measure_training():
    """Return a step of one process, and of all under accelerate without explicit lengths."""
    found = {}
    for method in TRAINED_WITH:
        model, _ = make_patched(method)
        found[method] = {"whole": measure_step(model, torch.Tensor.backward, not_at_all)}

    # From here on accelerate's state says that sequences are split.
    shims.allow_fsdp2_on_cpu()
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(cp_size=dist.get_world_size()),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )
    into = accelerator.maybe_context_parallel

    def prepared(method):
        model, _ = make_patched(method)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]

    def backward(loss):  # FSDP takes the mean of the gradients, where their sum is meant
        accelerator.backward(loss * dist.get_world_size())

    for method in TRAINED_WITH:
        found[method]["split"] = measure_step(prepared(method), backward, into)
        with mock.patch.object(hooks, "context_parallel_group", return_value=None):
            found[method]["unknown"] = measure_step(prepared(method), backward, into)
    found["complaint"] = complaint(prepared("dynamic-yarn"), into)
    return found


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
    found = {
        "positions": measure_positions(mesh),
        "logits": {method: measure_logits(mesh, method) for method in METHODS},
        "complaint": measure_complaint(mesh),
        "data parallel": measure_rows_of_ones_own(),
        "training": measure_training(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
