"""Test the calls of third-party kernels, with stand-ins in plain torch."""

import sys
from types import ModuleType

import pytest
import torch

from rope_patch import ops
from rope_patch.benchmarks import (
    SHAPES,
    ImplementationRun,
    Problem,
    Unavailable,
    builtin_implementations,
    third_party_implementations,
)
from rope_patch.ops import dispatch

FLASH_ATTENTION = """
import torch

def apply_rotary(x, cos, sin, conjugate=False):
    with torch.cuda.device(x.device.index):  # which only works with a GPU
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        sin = -sin if conjugate else sin
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
"""

ROPE = """
import torch
from ..device_type import DEVICE_COUNT
from .utils import long_indexing, torch_gpu_device
from .rms_layernorm import _eager_kernel

def fast_rope_embedding(q, k, cos, sin, positions=None):
    assert not long_indexing(q, k, block=128)
    with torch_gpu_device(q.device):
        return tuple(turned(x, cos[0], sin[0]) for x in (q, k))

def turned(x, cos, sin):
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + other * sin
"""

NORM_AND_ROPE = """
import torch
from .rope_embedding import turned

class Fast_QK_Norm_RoPE:
    @staticmethod
    def apply(q, k, q_weight, k_weight, cos, sin, indices, q_eps, k_eps, has_indices):
        assert not has_indices
        heads = zip((q, k), (q_weight, k_weight), (q_eps, k_eps))
        normed = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w for x, w, eps in heads)
        return tuple(turned(x, cos[:, None], sin[:, None]) for x in normed)
"""


def case(shape, batch=2, length=3):
    return Problem(
        shape=SHAPES[shape],
        batch=batch,
        length=length,
        layout="views",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def measure(name, shape, folder=None, **sizes):
    contenders = [*builtin_implementations(), *third_party_implementations(folder)]
    contender = next(c for c in contenders if c.name == name)
    problem = case(shape, **sizes)
    try:
        return ImplementationRun(contender, problem, [problem.sample(0)]).relative_errors()
    except (Unavailable, ImportError) as error:
        return str(error)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: True)


@pytest.fixture
def folder(tmp_path):
    files = {
        "rotary.py": FLASH_ATTENTION,
        "rope_embedding.py": ROPE,
        "qk_norm_rope.py": NORM_AND_ROPE,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "shape"),
    [("flash-attn", "llama-3-8b"), ("unsloth", "llama-3-8b"), ("unsloth", "qwen3-8b")],
)
def test_third_party_files_are_called_correctly(name, shape, folder, interpreted):
    errors = measure(name, shape, folder)
    assert set(errors) == {"q", "k", "dq", "dk"}
    assert max(errors.values()) < 1e-6


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("flash-attn", "llama-3-8b", "no rotary.py in the folder that --rivals names"),
        ("unsloth", "qwen3-8b", "no rope_embedding.py in the folder that --rivals names"),
        ("flash-attn", "qwen3-8b", "it rotates, and norms nothing"),
        ("fla", "gemma-3-12b", "it rotates, and norms nothing"),
        ("unsloth", "gemma-3-12b", "its norm has no offset, which Gemma needs"),
    ],
)
def test_unsupported_shapes_report_a_reason(name, shape, reason, tmp_path, interpreted):
    assert measure(name, shape, tmp_path) == reason
    assert measure(name, shape) == reason


@pytest.mark.parametrize(("name", "package"), [("liger", "liger_kernel"), ("fla", "fla")])
def test_missing_packages_are_named(name, package, interpreted, monkeypatch):
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    assert package in measure(name, "llama-3-8b")


def test_liger_is_called_correctly(interpreted, monkeypatch):
    """Use a stand-in with Liger's signatures and norm modules."""

    class Norm(torch.nn.Module):
        def __init__(self, size, eps, offset=0.0):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size))
            self.eps, self.offset = eps, offset

        def forward(self, x):
            scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            return x * scale * (self.weight + self.offset)

    def rotary(q, k, cos, sin):
        half = q.shape[-1] // 2
        return tuple(
            x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin for x in (q, k)
        )

    norms = ModuleType("liger_kernel.transformers.rms_norm")
    norms.LigerRMSNorm = Norm
    norms.LigerRMSNormForGemma3 = lambda dim, eps: Norm(dim, eps, 1.0)
    rope = ModuleType("liger_kernel.transformers.rope")
    rope.liger_rotary_pos_emb = rotary
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (norms, rope):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for shape in ("llama-3-8b", "qwen3-8b", "gemma-3-12b"):
        assert max(measure("liger", shape).values()) < 1e-6


@pytest.mark.skipif(not ops.is_interpreted(), reason="needs TRITON_INTERPRET=1")
def test_our_kernels_run_interpreted(interpreted, monkeypatch):
    """With TRITON_INTERPRET, our kernels run instead of plain torch."""
    kernels = []
    original = ops.qk_norm_rope
    monkeypatch.setattr(
        ops, "qk_norm_rope", lambda *a, **k: kernels.append(k["kernels"]) or original(*a, **k)
    )
    for name in ("ours", "ours-output"):
        assert max(measure(name, "qwen3-8b", batch=1, length=2).values()) < 1e-6
    assert set(kernels) == {"triton"}
