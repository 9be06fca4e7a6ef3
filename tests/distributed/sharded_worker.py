"""Measure logits in one of several processes that share weights or sequences under accelerate.

Run as `sharded_worker.py FOLDER` with the variables that torchrun sets; writes `FOLDER/RANK.json`,
which test_sharded_logits.py checks.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import shims
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from helpers.processes import leave_process_group
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TRAINED, make_model, tokens
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import rope_patch

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LENGTH = (
    2 * TRAINED
)  # one of two processes gets positions beyond the trained length, the other does not

METHODS = {
    "linear": {"factor": 4},
    "yarn": {"factor": 4},
    "dynamic-yarn": {},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
}


def make_patched(method, family="llama"):
    model = make_model(family)
    rope_patch.patch(model, method, **METHODS[method])
    return model


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


def reset_accelerate():
    """Reset accelerate's state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def share(**sizes):
    """Return an accelerator that splits weights, and optionally sequences, over all processes."""
    reset_accelerate()
    shims.allow_fsdp2_on_cpu()
    return Accelerator(
        parallelism_config=ParallelismConfig(**sizes),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )


def prepare(accelerator, model):
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0].eval()


# -- sharded weights -------------------------------------------------------------------------------


def measure_weights(method):
    """Return differences of a sharded model's logits, patched before or after sharding.

    Each process has a sequence of its own, one on either side of the trained length.
    """
    reset_accelerate()
    ids = tokens((TRAINED // 2, LENGTH)[RANK], seed=RANK)
    plain, whole = logits(make_model(), ids), logits(make_patched(method), ids)
    accelerator = share(dp_shard_size=SIZE)
    before = prepare(accelerator, make_patched(method))
    after = prepare(accelerator, make_model())
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


# -- split sequences -------------------------------------------------------------------------------


def split(batch, context):
    buffers = list(batch.values())
    return context(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers}
    )


def make_batch():
    return {"ids": tokens(LENGTH), "position_ids": torch.arange(LENGTH)[None]}


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


def measure_sequences(method):
    """Return differences of split from whole logits, and the error without positions."""
    reset_accelerate()
    whole = logits(make_patched(method), tokens(LENGTH))
    accelerator = share(cp_size=SIZE)
    context = accelerator.maybe_context_parallel
    model = prepare(accelerator, make_patched(method))
    batch = make_batch()
    with split(batch, context):
        part = logits(model, **batch)
    report = {"apart": max_difference(gather_logits(part, batch["position_ids"]), whole)}

    batch = make_batch()
    with split(batch, context):
        ids, positions = batch.values()
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


def measure_explicit_group(method):
    """Return the errors without positions, without accelerate, before, with and after a group."""
    reset_accelerate()
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    model = make_patched(method)
    handle = rope_patch.current(model)
    errors = {}
    for state, group in (("unknown", None), ("shared", mesh.get_group()), ("ended", None)):
        handle.share_length(group)
        batch = make_batch()
        with split(batch, lambda **buffers: context_parallel(mesh, **buffers)):
            errors[state] = error_of(lambda ids=batch["ids"]: logits(model, ids))
    return errors


def main(folder):
    torch.set_num_threads(1)
    PartialState.destroy_process_group = lambda *_: None
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),  # a file, as a port may be taken
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=60),
    )
    shims.allow_ring_attention_on_cpu()
    report = {
        "torch": {method: measure_explicit_group(method) for method in ("yarn", "dynamic-yarn")},
        "weights": {method: measure_weights(method) for method in METHODS},
        "sequences": {method: measure_sequences(method) for method in METHODS},
    }
    (folder / f"{RANK}.json").write_text(json.dumps(report))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
