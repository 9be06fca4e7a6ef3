"""Compile the launches of our kernels for GPUs that this machine need not have.

A launch is recorded with tensors on PyTorch's meta device, so it is what the ops would launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rope_patch.ops.kernels import cache_write, qk_norm_rope, rope, weight_gradient_sum
from rope_patch.ops.kernels.launcher import Launcher, LaunchSpec

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TYPES = {
    **{torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"},
    **{torch.int32: "*i32", torch.int64: "*i64"},
}

ROPE_KERNELS = ("rope", "rope backwards")
CACHE_KERNELS = ("rope into a cache", "norm into a cache")
NORM_KERNELS = ("norm", "norm backwards", "norm backwards by output", "norm backwards, frozen")

_SLOTS = 8192  # of a cache


@dataclass(frozen=True, kw_only=True)
class Job:
    """One launch in bfloat16, in the memory layout of projections.

    Attributes:
        kernel: One of `ROPE_KERNELS`, `NORM_KERNELS`, `CACHE_KERNELS`, "re-rotation" or "sum of
            weights".
        head_dim: D.
        rotary_dim: R; None: all of D.
        heads: Numbers of query and of key heads.
        interleaved: Whether pairs are neighbours.
        norm_all_heads: Whether the heads of a token are normed together.
        tokens: Tokens of the only row.
    """

    kernel: str
    head_dim: int
    rotary_dim: int | None = None
    heads: tuple[int, int] = (32, 8)
    interleaved: bool = False
    norm_all_heads: bool = False
    tokens: int = 8192

    def moved_bytes(self) -> int:
        """Return what must be moved for a token: reads, and writes of the results."""
        tensors = 3 if self.kernel.startswith("norm backwards") else 2
        return tensors * sum(self.heads) * self.head_dim * torch.bfloat16.itemsize


class LaunchRecorder(Launcher):
    """Records a launch, instead of launching."""

    def __call__(
        self, key: Any, tensors: Any, address_bits: int, make_spec: Any, *spec_args: Any
    ) -> None:
        """Record what the kernel gets."""
        self.tensors: tuple[torch.Tensor, ...] = tensors
        self.spec: LaunchSpec = make_spec(*spec_args)


def record_launch(job: Job) -> LaunchRecorder:
    """Return the recorded launch of a job."""
    rotary_dim = job.rotary_dim or job.head_dim
    q, k = (_empty(1, job.tokens, n, job.head_dim).transpose(1, 2) for n in job.heads)
    shapes = [(n, job.head_dim) if job.norm_all_heads else (job.head_dim,) for n in job.heads]
    weights = [_empty(*shape) for shape in shapes]
    positions = _empty(1, job.tokens, dtype=torch.int64)
    packed_freqs = _empty(rotary_dim // 2 + 1, dtype=torch.int64)
    where: Any = (positions, packed_freqs, None)
    settings: Any
    with _recorders() as recorders:
        if job.kernel == "re-rotation":
            settings = (job.interleaved, 1, False, True, True)
            rope.launch(k, None, *where, *settings)
        elif job.kernel in ROPE_KERNELS:
            settings = (job.interleaved, 1, job.kernel == "rope backwards")
            rope.launch(q, k, *where, *settings)
        elif job.kernel in CACHE_KERNELS:
            norms: Any = (*weights, 1e-6, 0.0) if job.kernel == "norm into a cache" else None
            cache = _empty(1, job.heads[1], _SLOTS, job.head_dim)
            start = _empty(dtype=torch.int64)
            settings = (cache, cache, start, *where, norms, job.interleaved, 1)
            cache_write.launch(q, k, k, *settings)
        elif job.kernel == "norm":
            settings = (*weights, *where, 1e-6, 0.0, job.interleaved, 1, True)
            qk_norm_rope.launch_forward(q, k, *settings)
        else:
            rows = [(1, job.tokens, *(() if job.norm_all_heads else (n,))) for n in job.heads]
            rstds = [_empty(*row, dtype=torch.float32) for row in rows]
            settings = (0.0, job.interleaved, 1, job.kernel == "norm backwards by output")
            trained = job.kernel != "norm backwards, frozen"
            arguments: Any = (q, k, *weights, *rstds, q, k, *where, *settings, trained)
            qk_norm_rope.launch_backward(*arguments)
    if job.kernel in (*ROPE_KERNELS, "re-rotation"):
        return recorders[rope, "_launcher"]
    if job.kernel in CACHE_KERNELS:
        return recorders[cache_write, "_launcher"]
    if job.kernel == "sum of weights":
        return recorders[weight_gradient_sum, "_launcher"]
    direction = "forward" if job.kernel == "norm" else "backward"
    return recorders[qk_norm_rope, f"_{direction}_launcher"]


@contextmanager
def _recorders() -> Iterator[dict[Any, LaunchRecorder]]:
    """Let all launchers record; yield the recorders by module and name."""
    launchers = {
        (module, name): value
        for module in (rope, qk_norm_rope, weight_gradient_sum, cache_write)
        for name, value in vars(module).items()
        if isinstance(value, Launcher)
    }
    recorders = {place: LaunchRecorder(x.kernel) for place, x in launchers.items()}
    try:
        for place, recorder in recorders.items():
            setattr(*place, recorder)
        yield recorders
    finally:
        for place, launcher in launchers.items():
            setattr(*place, launcher)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_launch(recorder: LaunchRecorder, target: GPUTarget) -> Any:
    """Compile the kernel as Triton would for the recorded launch, with aligned tensors."""
    kernel, spec = recorder.kernel, recorder.spec
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    args = (*recorder.tensors, *spec.scalars, *spec.constexprs.values())
    for index, (name, x) in enumerate(zip(kernel.arg_names, args, strict=True)):
        plain = name in (kernel.do_not_specialize or ())
        unaligned = name in (kernel.do_not_specialize_on_alignment or ())
        if name in spec.constexprs or (not plain and isinstance(x, int) and x == 1):
            signature[name], constants[index,] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = _TYPES[x.dtype]
            if not unaligned:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(x) < 2**31 else "i64"
            if not plain and x % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": spec.warps, "num_stages": 1})
