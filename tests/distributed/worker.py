"""Measure logits and steps in one of several processes that share weights or sequences.

Run as `worker.py FOLDER` with the variables that torchrun sets; writes `FOLDER/RANK.json`, which
test_shared_logits.py checks. One run measures everything, since starting processes is slow.
"""

import contextlib
import json
import sys
from pathlib import Path

import shims
import torch
import torch.distributed as dist
from helpers.processes import leave_process_group
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TRAINED, make_model, tokens
from shims import RANK, SIZE
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import rope_patch

# Of two processes, one gets both ends of a sequence and the other its middle. At this length only
# the first one has positions beyond the trained length.
LENGTH = 2 * TRAINED
WITHIN_ONE = LENGTH // 4 - 8  # the other process gets padding only

METHODS = {
    "yarn": {"factor": 4},
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


def logits(model, ids, **inputs):
    with torch.no_grad():
        model_logits = model(input_ids=ids, use_cache=False, **inputs).logits
    return model_logits.full_tensor() if isinstance(model_logits, DTensor) else model_logits


def max_difference(got, expected):
    return (got - expected).abs().max().item()


def error_of(call):
    """Return the error of a call, or None."""
    try:
        call()
    except ValueError as error:
        return str(error)


def prepare(accelerator, model):
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]


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
    parts = [torch.empty_like(part) for _ in range(SIZE)]
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
            difference = max_difference(gather_logits(part, batch["position_ids"]), whole)
        logits_report[source] = {"apart": difference, "reductions": reductions.count}
    return logits_report


def measure_positions(mesh):
    """Return the indices of this process's tokens."""
    batch = make_batch()
    with split(batch, torch_context(mesh)):
        return batch["position_ids"][0].tolist()


def measure_missing_positions(mesh, method):
    """Return the errors without positions, without accelerate, before, with and after a group."""
    model, handle = make_patched(method)
    errors = {}
    for state, group in (("unknown", None), ("shared", mesh.get_group()), ("ended", None)):
        handle.share_length(group)
        batch = make_batch()
        with split(batch, torch_context(mesh)):
            errors[state] = error_of(lambda ids=batch["input_ids"]: logits(model, ids))
    return errors


# -- data parallelism ------------------------------------------------------------------------------


def measure_data_parallel():
    """Return the difference of logits under DDP, which broadcasts buffers, from those without.

    Each process has rows of its own, so frequencies of other shapes: by rows or for all of them.
    """
    model, _ = make_patched("dynamic-yarn")
    rows = {0: (30, LENGTH), 1: (LENGTH // 2, LENGTH // 2)}[RANK]
    batches = [make_batch(rows), make_batch((20, 25)), make_batch(rows[::-1])]
    alone = [model(**batch, use_cache=False).logits for batch in batches]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    together = [parallel(**batch, use_cache=False).logits for batch in batches]
    return max(max_difference(a, b) for a, b in zip(alone, together, strict=True))


# -- sharded weights -------------------------------------------------------------------------------


def measure_weights(method):
    """Return differences of a sharded model's logits, patched before or after sharding.

    Each process has a sequence of its own, one on either side of the trained length.
    """
    shims.wait()
    ids = tokens((TRAINED // 2, LENGTH)[RANK], seed=RANK)
    plain, whole = logits(make_model(), ids), logits(make_patched(method)[0], ids)
    accelerator = shims.share(dp_shard_size=SIZE)
    before = prepare(accelerator, make_patched(method)[0]).eval()
    after = prepare(accelerator, make_model()).eval()
    names = [name for name, _ in after.named_parameters()]
    unpatched = max_difference(logits(after, ids), plain)
    rope_patch.patch(after, method, **METHODS[method])
    differences = {
        "unpatched": unpatched,
        "before": max_difference(logits(before, ids), whole),
        "after": max_difference(logits(after, ids), whole),
        "moved": max_difference(whole, plain),
        "sharded": sum(isinstance(p, DTensor) for p in before.parameters()),
        "same names": names == [name for name, _ in after.named_parameters()],
    }
    for name, model in (("before", before), ("after", after)):
        rope_patch.unpatch(model)
        differences[f"{name}, undone"] = max_difference(logits(model, ids), plain)
    return differences


# -- accelerate's context parallelism --------------------------------------------------------------


def measure_sequences(method):
    """Return differences of split from whole logits, and the error without positions."""
    shims.wait()
    whole = logits(make_patched(method)[0], tokens(LENGTH))
    accelerator = shims.share(cp_size=SIZE)
    context = accelerator.maybe_context_parallel
    model = prepare(accelerator, make_patched(method)[0]).eval()
    batch = make_batch()
    with split(batch, context):
        part = logits(model, batch["input_ids"], position_ids=batch["position_ids"])
    report = {"apart": max_difference(gather_logits(part, batch["position_ids"]), whole)}

    batch = make_batch()
    with split(batch, context):
        ids, positions = batch["input_ids"], batch["position_ids"]
        report["complaints"] = {
            "nothing": error_of(lambda: logits(model, ids)),
            "None": error_of(lambda: logits(model, ids, position_ids=None)),
            "by position": error_of(lambda: model(ids, None, None)),
            "decoder": error_of(lambda: model.model(ids)),
            "training": error_of(lambda: model.train()(input_ids=ids, labels=ids)),
        }
        model.eval()
        with torch.no_grad():
            report["accepted"] = error_of(lambda: model(ids, None, positions, use_cache=False))
        rope_patch.unpatch(model)
        report["unpatched"] = error_of(lambda: logits(model, ids))
    return report


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
    shims.wait()
    report = {}
    for method in TRAINING_METHODS:
        model, _ = make_patched(method)
        report[method] = {"whole": measure_step(model, torch.Tensor.backward, no_parallelism)}

    accelerator = shims.share(cp_size=SIZE)  # from here on accelerate's state has split sequences
    context = accelerator.maybe_context_parallel

    def backward(loss):  # FSDP takes the mean of the gradients, where their sum is meant
        accelerator.backward(loss * SIZE)

    for method in TRAINING_METHODS:
        for source in ("split", "unknown"):
            model, handle = make_patched(method)
            handle.fix_length(LENGTH // SIZE if source == "unknown" else None)
            report[method][source] = measure_step(prepare(accelerator, model), backward, context)
    return report


def main(folder):
    shims.join(folder)
    shims.allow_ring_attention_on_cpu()
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    report = {
        "positions": measure_positions(mesh),
        "logits": {method: measure_logits(mesh, method) for method in METHODS},
        "missing": {m: measure_missing_positions(mesh, m) for m in ("yarn", "dynamic-yarn")},
        "data parallel": measure_data_parallel(),
        "weights": {method: measure_weights(method) for method in METHODS},
        "sequences": {method: measure_sequences(method) for method in METHODS},
        "training": measure_training(),
    }
    (folder / f"{RANK}.json").write_text(json.dumps(report))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
