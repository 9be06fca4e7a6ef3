"""Test the measurement of Python time, which runs where Triton compiles."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

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


def test_parts_add_up_and_each_layer_launches_once():

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    *table, numbers = output.splitlines()
    launches, times = json.loads(numbers)
    assert launches == 2 * 3 * 4
    for parts in times.values():
        best = {name: time["best"] for name, time in parts.items()}
        whole = sum(best[name] for name in ("norms", "rotate", "op", "launcher"))
        assert whole == pytest.approx(best["whole"])
        assert 0 < best["op"] < best["whole"] < best["transformers"]
    assert table[0] == "| µs a layer, best (median) | qwen3-8b | llama-3-8b |"
    assert len(table) == 2 + 7


def test_interpreter_is_refused():
    command = [sys.executable, "-m", "rope_patch.benchmarks.kernels.host_time"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert "TRITON_INTERPRET is set" in result.stderr
