"""Third-party implementations: installed packages, and files that no package installs.

This project must contain no line of their code, because of their licences. Files come from a folder
that the user fills; the help of `rope-patch bench` names them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from rope_patch.benchmarks.kernels.implementations import Call, Implementation, Unavailable
from rope_patch.benchmarks.kernels.problems import Problem

_UNSLOTH = "_rope_patch_rival_unsloth"  # parent package of its files' relative imports
_INT32_LIMIT = 2**31  # elements beyond 32-bit indices


def third_party_implementations(folder: Path | None) -> list[Implementation]:
    """Return all third-party implementations; building one raises if it is missing."""

    def file(build: Callable[[Problem, Path], Call]) -> Callable[[Problem], Call]:
        return lambda problem: build(problem, folder or Path())

    return [
        Implementation(name="liger", title="Liger", build=_liger, in_place=True),
        Implementation(name="flash-attn", title="flash-attention", build=file(_flash_attention)),
        Implementation(
            name="unsloth", title="Unsloth", build=file(_unsloth), in_place=True, frozen=True
        ),
        Implementation(name="fla", title="FLA", build=_fla),
    ]


def _liger(problem: Problem) -> Call:
    _require_triton(problem)
    from liger_kernel.transformers.rms_norm import LigerRMSNorm, LigerRMSNormForGemma3
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    shape, (cos, sin) = problem.shape, problem.cos_sin
    norm_class = LigerRMSNormForGemma3 if shape.offset else LigerRMSNorm
    norms: list[Any] = [norm_class(shape.head_dim, eps=shape.eps) for _ in problem.weights]
    for module, weight in zip(norms, problem.weights, strict=True):
        module.weight = weight

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        if norms:
            q, k = norms[0](q), norms[1](k)
        return liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    return call


def _flash_attention(problem: Problem, folder: Path) -> Call:
    _require_triton(problem)
    _require_no_norm(problem)
    apply_rotary = _load_module(folder / "rotary.py", "_rope_patch_rival_flash_attn").apply_rotary
    if (
        problem.batch * problem.length * problem.shape.heads * problem.shape.head_dim
        >= _INT32_LIMIT
    ):
        raise Unavailable("its indices have 32 bits, and there are 2^31 elements or more")
    cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in problem.cos_sin)

    class Rotary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with _without_device(x):
                return apply_rotary(x, cos, sin)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with _without_device(grad):
                return apply_rotary(grad, cos, sin, conjugate=True)

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        return Rotary.apply(q).transpose(1, 2), Rotary.apply(k).transpose(1, 2)

    return call


def _unsloth(problem: Problem, folder: Path) -> Call:
    _require_triton(problem)
    shape, (cos, sin) = problem.shape, problem.cos_sin
    if shape.offset:
        raise Unavailable("its norm has no offset, which Gemma needs")
    _stub_unsloth()
    package = f"{_UNSLOTH}.kernels"
    rope = _load_module(
        folder / "rope_embedding.py", f"{package}.rope_embedding"
    ).fast_rope_embedding
    if not problem.weights:
        return lambda q, k: rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    fused = _load_module(folder / "qk_norm_rope.py", f"{package}.qk_norm_rope").Fast_QK_Norm_RoPE
    weights = [weight.detach() for weight in problem.weights]
    op_inputs = (cos[0], sin[0], cos.new_empty(1, dtype=torch.int32), shape.eps, shape.eps, False)

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        q, k = fused.apply(q, k, *weights, *op_inputs)
        return q.transpose(1, 2), k.transpose(1, 2)

    return call


def _fla(problem: Problem) -> Call:
    _require_triton(problem)
    _require_no_norm(problem)
    from fla.modules.rotary import rotary_embedding

    cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in problem.cos_sin)

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        q, k = (rotary_embedding(x, cos, sin) for x in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2)

    return call


def _require_triton(problem: Problem) -> None:
    from rope_patch.ops.dispatch import is_interpreted

    if problem.device.type == "cpu" and not is_interpreted():
        raise Unavailable("Triton needs a GPU, or TRITON_INTERPRET=1 and patience")


def _require_no_norm(problem: Problem) -> None:
    if problem.weights:
        raise Unavailable("it rotates, and norms nothing")


@functools.cache  # a new module per call would compile its kernels again
def _load_module(path: Path, name: str) -> Any:
    """Load a file as a module."""
    if not path.is_file():
        raise Unavailable(f"no {path.name} in the folder that --rivals names")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _without_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Disable `torch.cuda.device`, which flash-attention's launcher enters, without a GPU."""
    if x.device.type != "cuda":
        return mock.patch.object(torch.cuda, "device", nullcontext)
    return nullcontext()


def _stub_unsloth() -> None:
    """Define the few names that Unsloth's files import from the rest of Unsloth."""
    import triton

    def device(of: torch.device) -> AbstractContextManager[Any]:
        return torch.cuda.device(of) if of.type == "cuda" else nullcontext()

    def long_indexing(*tensors: torch.Tensor, block: int = 0) -> bool:
        ends = (
            sum((n - 1) * by for n, by in zip(t.shape, t.stride(), strict=True)) for t in tensors
        )
        return max(ends) + block >= _INT32_LIMIT

    def same(kernel: Any) -> Any:
        return kernel

    stubs: dict[str, dict[str, Any]] = {
        "": {},
        ".kernels": {},
        ".device_type": {"DEVICE_COUNT": 1, "DEVICE_TYPE": "cuda", "DEVICE_TYPE_TORCH": "cuda"},
        ".kernels.utils": {
            "DEVICE_TYPE": "cuda",
            "long_indexing": long_indexing,
            "next_power_of_2": triton.next_power_of_2,
            "torch_gpu_device": device,
            "torch_device_stream": torch.cuda.current_stream,
        },
        ".kernels.rms_layernorm": {
            "_BF16_TRACEABLE": False,
            "_TRACEABLE": False,
            "_eager_kernel": same,
            "_traced_kernel": same,
            "_tag_compile_cache": str,
            "fast_rms_layernorm": None,
        },
    }
    for name, content in stubs.items():
        module = ModuleType(_UNSLOTH + name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules.setdefault(module.__name__, module)
