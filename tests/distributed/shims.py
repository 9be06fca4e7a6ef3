"""Join processes, and let torch's ring attention and accelerate's FSDP2 run without a GPU.

The shims replace private parts of torch and accelerate, so the tests are skipped on other versions
than `WRITTEN_FOR`. They are for worker processes only, since nothing is restored.
"""

import os
from datetime import timedelta

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from packaging.version import Version

WRITTEN_FOR = {torch: "2.13", accelerate: "1.15"}


RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def join(folder):
    """Join the other processes in a group that lasts for all runs, if there are any."""
    torch.set_num_threads(1)
    PartialState.destroy_process_group = lambda *_: None
    if SIZE > 1:
        dist.init_process_group(
            "gloo",
            init_method=(folder / "rendezvous").as_uri(),  # a file, as a port may be taken
            rank=RANK,
            world_size=SIZE,
            timeout=timedelta(seconds=60),
        )


def wait():
    """Synchronise all processes, and reset accelerate's state."""
    if dist.is_initialized():
        dist.barrier()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def share(**sizes):
    """Return an accelerator that splits weights, and optionally sequences, over all processes."""
    wait()
    allow_fsdp2_on_cpu()
    return Accelerator(
        parallelism_config=ParallelismConfig(**sizes),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )


def unsupported_reason():
    """Return why the shims cannot be used here, or None."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "processes on CPUs talk by gloo, which this torch was built without"
    for package, version in WRITTEN_FOR.items():
        if Version(package.__version__).release[:2] != Version(version).release:
            return (
                f"private parts of {package.__name__} {version} are needed, and this is "
                f"{package.__name__} {package.__version__}"
            )
    return None


def allow_ring_attention_on_cpu():
    """Register the CPU's fused attention with `context_parallel`, which has only the GPUs'.

    The operators get DTensors whose sequence (dimension 2) is sharded over the mesh. torch's
    templates pass the keys around the ring and merge the results.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def ring_call(template, operator, sharded, names, args, kwargs):
        """Call a template on the local shards; shard its results like `sharded`."""
        inputs = {name: local(value) for name, value in zip(names, args, strict=False)} | kwargs
        mesh = sharded.device_mesh
        results = template(mesh.get_group(), 2, operator, **inputs)
        return tuple(DTensor.from_local(r, mesh, sharded.placements) for r in results)

    def forward(_, args, kwargs):
        names = ("query", "key", "value", "dropout_p", "is_causal")
        return ring_call(ring._templated_ring_attention, attend, args[0], names, args, kwargs)

    def backward(_, args, kwargs):
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
        kwargs = {**kwargs, "grad_out_name": "grad_out"}
        template = ring._templated_ring_attention_backward
        return ring_call(template, attend_backward, args[1], names, args, kwargs)

    ring.custom_ops |= {attend: forward, attend_backward: backward}


def allow_fsdp2_on_cpu():
    """Make accelerate treat CPU processes as GPU processes, over which it shards models.

    This holds for every new state, since transformers' Trainer resets the state.
    """
    original_init = PartialState.__init__

    def init_as_gpus(state, cpu=False, **kwargs):
        original_init(state, cpu=True, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init_as_gpus
    PartialState()
