"""Test what runs where Triton compiles: Python's time at launches, and the copy kernel's code."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

import triton

from rope_patch.benchmarks.kernels import host_time

COPY_KERNEL = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from rope_patch.benchmarks.kernels import copy_kernel

signature = {"source": "*i32", "target": "*i32", "words": "i32", "BLOCK": "constexpr"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
source = ASTSource(copy_kernel.copy_words, signature, {(3,): copy_kernel.BLOCK}, aligned)
target, options = GPUTarget("cuda", 90, 32), {"num_warps": copy_kernel.WARPS}
code = triton.compile(source, target=target, options=options).asm["ptx"]
print(*sorted(set(re.findall(r"(?:ld|st)\\.global\\S*", code))))
"""

# Three layers of Qwen 3 and of Llama: launches are counted, then everything is timed.
CODE = """
import json
from dataclasses import asdict, replace
import torch
from rope_patch.benchmarks.kernels import host_time
from rope_patch.benchmarks.kernels.shapes import SHAPES

launches = []
shapes = [replace(SHAPES[name], layers=3) for name in ("qwen3-8b", "llama-3-8b")]
with torch.no_grad(), host_time.idle_driver(lambda *_: launches.append(1)):
    for shape in shapes:
        layers = host_time._Layers(shape)
        layers.patch()
        for _ in range(4):
            layers.step()
count = len(launches)
times = {shape.name: host_time.measure(shape, 5) for shape in shapes}
print(host_time.format_table(times))
numbers = {n: {part: asdict(t) for part, t in parts.items()} for n, parts in times.items()}
print(json.dumps([count, numbers]))
"""


@pytest.fixture(scope="module")
def lines():
    """Return what a process prints that does not interpret kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COPY_KERNEL + CODE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_copy_kernel_accesses_16_bytes_at_a_time(lines):
    assert lines[0].split() == ["ld.global.v4.b32", "st.global.v4.b32"]


def test_parts_add_up_and_each_layer_launches_once(lines):
    *table, numbers = lines[1:]
    launches, times = json.loads(numbers)
    assert launches == 2 * 3 * 4
    for parts in times.values():
        best = {name: time["best"] for name, time in parts.items()}
        whole = sum(best[name] for name in ("norms", "rotate", "op", "launcher"))
        assert whole == pytest.approx(best["whole"])
        assert 0 < best["op"] < best["whole"] < best["transformers"]
    assert table[0] == "| µs a layer, best (median) | qwen3-8b | llama-3-8b |"
    assert len(table) == 2 + 7


def test_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(sys, "argv", ["host_time"])
    with pytest.raises(SystemExit, match="1"):
        host_time.main()
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
