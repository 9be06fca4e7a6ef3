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

from rope_patch.ops import AttentionRegions
from rope_patch.ops.kernels import (
    attention,
    attention_backward,
    cache_write,
    qk_norm_rope,
    qk_norm_rope_kernels,
    rerotate,
    rope,
)
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

ATTENTION_KERNELS = ("attention", "gradient of queries", "gradient of keys")

_MODULES = (
    *(rope, qk_norm_rope, qk_norm_rope_kernels, rerotate, cache_write),
    *(attention, attention_backward),
)

_SLOTS = 8192  # of a cache
_REGIONS = 3  # of a position map


@dataclass(frozen=True, kw_only=True)
class Job:
    """One launch in bfloat16, in the memory layout of projections.

    Attributes:
        kernel: One of `ROPE_KERNELS`, `NORM_KERNELS`, `CACHE_KERNELS`, `ATTENTION_KERNELS`,
            "re-rotation" or "sum of weights".
        head_dim: D.
        rotary_dim: R; None: all of D.
        heads: Numbers of query and of key heads.
        interleaved: Whether pairs are neighbours.
        norm_all_heads: Whether the heads of a token are normed together.
        tokens: Tokens of the only row.
        offset: Added to the norms' weights; it changes no code of ours.
        layers: Layers whose keys are re-rotated in one launch.
    """

    kernel: str
    head_dim: int
    rotary_dim: int | None = None
    heads: tuple[int, int] = (32, 8)
    interleaved: bool = False
    norm_all_heads: bool = False
    tokens: int = 8192
    offset: float = 0.0
    layers: int = 1

    def moved_bytes(self) -> int:
        """Return what must be moved for a token of a layer: reads, and writes of the results."""
        tensors = 3 if self.kernel.startswith("norm backwards") else 2
        heads = self.heads[1] if self.kernel == "re-rotation" else sum(self.heads)
        return tensors * heads * self.head_dim * torch.bfloat16.itemsize


_QWEN: Any = {"head_dim": 128}
_GEMMA: Any = {"head_dim": 256, "heads": (16, 8), "offset": 1.0}
_OLMO: Any = {"head_dim": 128, "heads": (32, 32), "norm_all_heads": True}
_SMOL: Any = {"head_dim": 64, "heads": (9, 3)}

MODEL_JOBS = {
    "Llama 3 8B, rope": Job(kernel="rope", head_dim=128),
    "Gemma 3 12B, rope": Job(kernel="rope", **_GEMMA),
    "SmolLM2 135M, rope": Job(kernel="rope", **_SMOL),
    **{f"Qwen3 8B, {kernel}": Job(kernel=kernel, **_QWEN) for kernel in NORM_KERNELS},
    **{f"Gemma 3 12B, {kernel}": Job(kernel=kernel, **_GEMMA) for kernel in NORM_KERNELS[:2]},
    **{f"OLMo 2 7B, {kernel}": Job(kernel=kernel, **_OLMO) for kernel in NORM_KERNELS[:2]},
    "Llama 3 8B, rope, one token": Job(kernel="rope", head_dim=128, tokens=1),
    "SmolLM2 135M, rope, one token": Job(kernel="rope", **_SMOL, tokens=1),
    "Qwen3 8B, norm, one token": Job(kernel="norm", **_QWEN, tokens=1),
    "Gemma 3 12B, norm, one token": Job(kernel="norm", **_GEMMA, tokens=1),
}

COMPARED_JOBS = {
    name: MODEL_JOBS[name]
    for name in (
        "Llama 3 8B, rope",
        "Gemma 3 12B, rope",
        "SmolLM2 135M, rope",
        "Qwen3 8B, norm",
        "Gemma 3 12B, norm",
    )
}

VARIANT_JOBS = {
    **{
        f"{kernel}, {head_dim}, {'neighbours' if interleaved else 'halves'}": Job(
            kernel=kernel, head_dim=head_dim, interleaved=interleaved
        )
        for kernel in ("rope", *NORM_KERNELS)
        for head_dim in (64, 128, 256)
        for interleaved in (False, True)
    },
    "rope backwards": Job(kernel="rope backwards", head_dim=128),
    "re-rotation, one layer": Job(kernel="re-rotation", head_dim=128),
    "re-rotation, 36 layers": Job(kernel="re-rotation", head_dim=128, layers=36),
    "re-rotation, 30 narrow layers": Job(kernel="re-rotation", **_SMOL, layers=30),
    "rope, a part": Job(kernel="rope", head_dim=128, rotary_dim=32),
    **{
        f"{kernel}, {tokens}": Job(kernel=kernel, head_dim=128, tokens=tokens)
        for kernel in CACHE_KERNELS
        for tokens in (1, 8192)
    },
    "norm of all heads into a cache": Job(kernel="norm into a cache", **_OLMO, tokens=1),
    "sum of weights": Job(kernel="sum of weights", head_dim=128),
    "sum of weights of all heads": Job(kernel="sum of weights", head_dim=128, norm_all_heads=True),
}

ATTENTION_JOBS = {
    "Llama 3 8B, a prompt": Job(kernel="attention", head_dim=128),
    "SmolLM2 135M, a prompt": Job(kernel="attention", **_SMOL),
    "Gemma 3 12B, a prompt": Job(kernel="attention", **_GEMMA),
    "Llama 3 8B, one token": Job(kernel="attention", head_dim=128, tokens=1),
    **{
        f"{model}, {kernel}": Job(kernel=kernel, **sizes)
        for model, sizes in (("Llama 3 8B", _QWEN), ("SmolLM2 135M", _SMOL))
        for kernel in ATTENTION_KERNELS[1:]
    },
}


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is launched with.

    Attributes:
        kernel: The kernel.
        arguments: Its arguments by name, with PyTorch's tensors.
        grid: Programs along each dimension.
        options: Options of the compiler, such as "num_warps".
    """

    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the arguments that the kernel is compiled for."""
        return {x.name: self.arguments[x.name] for x in self.kernel.params if x.is_constexpr}


class LaunchRecorder(Launcher):
    """Records a launch, instead of launching."""

    def __call__(
        self, key: Any, tensors: Any, address_bits: int, make_spec: Any, *spec_args: Any
    ) -> None:
        """Record what the kernel gets."""
        spec: LaunchSpec = make_spec(*spec_args)
        values = (*tensors, *spec.scalars, *spec.constexprs.values())
        arguments = dict(zip(self.kernel.arg_names, values, strict=True))
        options = {"num_warps": spec.warps, "num_stages": spec.stages}
        self.launch = Launch(self.kernel, arguments, spec.grid, options)


def record_launch(job: Job) -> Launch:
    """Return the recorded launch of a job."""
    if job.kernel in ATTENTION_KERNELS:
        return _record_attention(job)
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
            rerotate.launch([k] * job.layers, positions, packed_freqs, job.interleaved)
        elif job.kernel in ROPE_KERNELS:
            settings = (job.interleaved, 1, job.kernel == "rope backwards")
            rope.launch(q, k, *where, *settings)
        elif job.kernel in CACHE_KERNELS:
            norms: Any = (*weights, 1e-6, 0.0) if job.kernel == "norm into a cache" else None
            cache = _empty(1, job.heads[1], _SLOTS, job.head_dim)
            settings = (_empty(dtype=torch.int64), *where, norms, job.interleaved, 1)
            cache_write.launch(q, k, k, cache, cache, *settings)
        elif job.kernel == "norm":
            settings = (*weights, *where, 1e-6, job.offset, job.interleaved, 1, True)
            qk_norm_rope.launch_forward(q, k, *settings)
        else:
            rows = [(1, job.tokens, *(() if job.norm_all_heads else (n,))) for n in job.heads]
            rstds = [_empty(*row, dtype=torch.float32) for row in rows]
            settings = (job.offset, job.interleaved, 1, job.kernel == "norm backwards by output")
            trained = job.kernel != "norm backwards, frozen"
            arguments: Any = (q, k, *weights, *rstds, q, k, *where, *settings, trained)
            qk_norm_rope.launch_backward(*arguments)
    if job.kernel in ROPE_KERNELS:
        return recorders[rope, "_launcher"].launch
    if job.kernel == "re-rotation":
        return recorders[rerotate, "_launcher"].launch
    if job.kernel in CACHE_KERNELS:
        return recorders[cache_write, "_launcher"].launch
    if job.kernel == "sum of weights":
        return recorders[qk_norm_rope_kernels, "_launcher"].launch
    direction = "forward" if job.kernel == "norm" else "backward"
    return recorders[qk_norm_rope, f"_{direction}_launcher"].launch


def _record_attention(job: Job) -> Launch:
    """Return the recorded launch of attention over as many keys as a cache has slots."""
    q = _empty(1, job.tokens, job.heads[0], job.head_dim).transpose(1, 2)
    k = _empty(1, job.heads[1], _SLOTS, job.head_dim)
    spans = _empty(1, _REGIONS, job.tokens, dtype=torch.int32)
    shifts = (_empty(1, _REGIONS, n, 1, dtype=torch.int64) for n in (job.tokens, _SLOTS))
    turns = _empty(_REGIONS, dtype=torch.int32)
    packed_freqs = _empty(job.head_dim // 2 + 1, dtype=torch.int64)
    regions = AttentionRegions(spans, spans, *shifts, turns, packed_freqs)
    how: Any = (regions, job.head_dim**-0.5, None, False)
    with _recorders() as recorders:
        if job.kernel == "attention":
            attention.launch(q, k, k, None, *how, attention.count_splits(q, k))
            return recorders[attention, "_launcher"].launch
        lse = _empty(*q.shape[:3], dtype=torch.float32)
        attention_backward.launch_backward(q, q, k, k, q, lse, *how)
        side = "query" if job.kernel == "gradient of queries" else "key"
        return recorders[attention_backward, f"_{side}_launcher"].launch


@contextmanager
def _recorders() -> Iterator[dict[Any, LaunchRecorder]]:
    """Let all launchers record; yield the recorders by module and name."""
    launchers = {
        (module, name): value
        for module in _MODULES
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


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """Compile the kernel as Triton would for a launch with aligned tensors."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, x = parameter.name, launch.arguments[parameter.name]
        plain = parameter.do_not_specialize
        if parameter.is_constexpr or x is None or (not plain and isinstance(x, int) and x == 1):
            signature[name], constants[index,] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = _TYPES[x.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(x) < 2**31 else "i64"
            if not plain and x % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    return triton.compile(source, target=target, options=launch.options)
