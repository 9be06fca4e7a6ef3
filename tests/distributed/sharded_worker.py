"""One of the processes that share a model's weights or its sequences, under accelerate.

Run as `sharded_worker.py FOLDER` with the variables that torchrun sets; leaves `FOLDER/RANK.json`.
What must hold is said in test_sharded_logits.py.
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
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, TRAINED, make_model, tokens
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import rope_patch

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LENGTH = 2 * TRAINED  # of two processes one sees more than the trained length, the other does not

METHODS = {
    "linear": {"factor": 4},
    "yarn": {"factor": 4},
    "dynamic-yarn": {},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
}


def patched(method, family="llama"):
    model = make_model(family)
    rope_patch.patch(model, method, **METHODS[method])
    return model


def logits(model, ids, **given):
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False, **given).logits
    return found.full_tensor() if isinstance(found, DTensor) else found


def apart(got, expected):
    return (got - expected).abs().max().item()


def complaint(call):
    """Return the error of a call, or None."""
    try:
        call()
    except ValueError as error:
        return str(error)


def forget():
    """Reset accelerate's state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def share(**sizes):
    """Return an accelerator that splits weights, and optionally sequences, over all processes."""
    forget()
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


# -- weights in pieces -----------------------------------------------------------------------------


def measure_weights(method):
    """Return differences of a sharded model's logits, patched before or after sharding.

    Each process has a sequence of its own, one on either side of the trained length.
    """
    forget()
    ids = tokens((TRAINED // 2, LENGTH)[RANK], seed=RANK)
    plain, whole = logits(make_model(), ids), logits(patched(method), ids)
    accelerator = share(dp_shard_size=SIZE)
    before = prepare(accelerator, patched(method))
    after = prepare(accelerator, make_model())
    names = [name for name, _ in after.named_parameters()]
    unpatched = apart(logits(after, ids), plain)
    rope_patch.patch(after, method, **METHODS[method])
    found = {
        "unpatched": unpatched,
        "before": apart(logits(before, ids), whole),
        "after": apart(logits(after, ids), whole),
        "moved": apart(whole, plain),
        "sharded": sum(isinstance(p, DTensor) for p in before.parameters()),
        "same names": names == [name for name, _ in after.named_parameters()],
    }
    for name, model in (("before", before), ("after", after)):
        rope_patch.unpatch(model)
        found[f"{name}, undone"] = apart(logits(model, ids), plain)
    return found


# -- sequences in pieces ---------------------------------------------------------------------------


def split(batch, into):
    buffers = list(batch.values())
    return into(buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers})


def make_batch():
    return {"ids": tokens(LENGTH), "position_ids": torch.arange(LENGTH)[None]}


def gathered(part, positions):
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
    forget()
    whole = logits(patched(method), tokens(LENGTH))
    accelerator = share(cp_size=SIZE)
    into = accelerator.maybe_context_parallel
    model = prepare(accelerator, patched(method))
    batch = make_batch()
    with split(batch, into):
        part = logits(model, **batch)
    found = {"apart": apart(gathered(part, batch["position_ids"]), whole)}

    batch = make_batch()
    with split(batch, into):
        ids, positions = batch.values()
        found["complaints"] = {
            "nothing": complaint(lambda: logits(model, ids)),
            "None": complaint(lambda: logits(model, ids, position_ids=None)),
            "by position": complaint(lambda: model(ids, None, None)),
            "decoder": complaint(lambda: model.model(ids)),
            "training": complaint(lambda: model.train()(input_ids=ids, labels=ids)),
        }
        model.eval()
        with torch.no_grad():
            found["accepted"] = complaint(lambda: model(ids, None, positions, use_cache=False))
        rope_patch.unpatch(model)
        found["unpatched"] = complaint(lambda: logits(model, ids))
    return found


def measure_torchs_own(method):
    """Measure the same without accelerate, with an explicit group."""
    forget()
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    model = patched(method)
    handle = rope_patch.current(model)
    said = {}
    for how, group in (("unknown", None), ("shared", mesh.get_group()), ("ended", None)):
        handle.share_length(group)
        batch = make_batch()
        with split(batch, lambda **given: context_parallel(mesh, **given)):
            said[how] = complaint(lambda ids=batch["ids"]: logits(model, ids))
    return said


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
    found = {
        "torch": {method: measure_torchs_own(method) for method in ("yarn", "dynamic-yarn")},
        "weights": {method: measure_weights(method) for method in METHODS},
        "sequences": {method: measure_sequences(method) for method in METHODS},
    }
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
