"""What lets context parallelism run without a GPU: torch's ring attention and accelerate's FSDP2.

Both are meant for GPUs, and stop on a CPU for want of a few lines. They are here, and reach into
private parts of torch and accelerate: on other versions than `WRITTEN_FOR` the tests are skipped.
Made for processes that do nothing else; nothing is put back.
"""

import accelerate
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from packaging.version import Version

WRITTEN_FOR = {torch: "2.13", accelerate: "1.15"}


def why_not():
    """Return why the shims cannot be used here, or None."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "processes on CPUs talk by gloo, which this torch was built without"
    for package, known in WRITTEN_FOR.items():
        if Version(package.__version__).release[:2] != Version(known).release:
            return (
                f"private parts of {package.__name__} {known} are needed, and this is "
                f"{package.__name__} {package.__version__}"
            )
    return None


def allow_ring_attention_on_cpu():
    """Register the CPU's fused attention with `context_parallel`, which knows the GPUs' only.

    The operators are handed over as DTensors whose sequence (dimension 2) lies in shards over the
    mesh; torch's own templates pass the keys around the ring and merge what comes of them.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def ring_call(template, operator, sharded, names, args, kwargs):
        """Call a template on the local shards; shard its results like `sharded`."""
        given = {name: local(value) for name, value in zip(names, args, strict=False)} | kwargs
        mesh = sharded.device_mesh
        results = template(mesh.get_group(), 2, operator, **given)
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
    """Make accelerate take these CPU processes for GPUs, over which it shards models.

    Whenever it looks, since transformers' Trainer makes it forget what it saw before.
    """
    look = PartialState.__init__

    def looks_like_gpus(state, cpu=False, **kwargs):
        look(state, cpu=True, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = looks_like_gpus
    PartialState()
