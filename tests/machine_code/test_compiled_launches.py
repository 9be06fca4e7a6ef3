"""Test what runs where Triton compiles: Python's time at launches, and third-party kernels.

All of it runs in one process of its own, because tests interpret kernels. A stand-in for
flash-attention is recorded and compared.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

import triton
from helpers.processes import python_path

from machine_code import host_time
from machine_code.launch_code import Code
from machine_code.rival_code import OURS, format_comparison, missing
from machine_code.sass import TOOLS

HAS_TOOLS = (TOOLS / "nvdisasm").is_file()

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
from machine_code import host_time
from rope_patch.benchmarks import SHAPES

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


# With a program for 256 numbers, a default, a missing tensor and a grid that depends on arguments.
STAND_IN = """
import torch
import triton
import triton.language as tl

@triton.jit
def double(x, unused, n, SIZE: tl.constexpr, FACTOR: tl.constexpr = 2):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at, mask=at < n) * FACTOR, mask=at < n)

def apply_rotary(x, cos, sin, conjugate=False):
    def grid(arguments):
        return (triton.cdiv(arguments["n"], arguments["SIZE"]),)

    with torch.cuda.device(x.device.index):  # which only works with a GPU
        torch.library.wrap_triton(double)[grid](x, None, x.numel(), 256, num_warps=2)
    return x
"""

RIVALS = """
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from machine_code.cross_compilation import Job
from machine_code.rival_code import compare, record_rival
from rope_patch.benchmarks import Unavailable, third_party_implementations

sys.modules["liger_kernel"] = None
job, folder = Job(kernel="rope", head_dim=128, heads=(6, 2), tokens=32), Path(sys.argv[1])
rival = next(x for x in third_party_implementations(folder) if x.name == "flash-attn")
launches = [
    [list(x.arguments["x"].shape), x.grid, x.options, x.constants, x.arguments["unused"]]
    for x in record_rival(rival, job)
]
more = replace(rival, build=lambda problem: lambda q, k: rival.build(problem)(q + 1, k))
refusal = None
try:
    record_rival(more, job)
except Unavailable as error:
    refusal = str(error)
comparisons = compare({"small": job}, "sm_90", folder)
result = {"launches": launches, "comparisons": comparisons, "refusal": refusal}
print(json.dumps(result, default=asdict))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return the lines that the process prints."""
    folder = tmp_path_factory.mktemp("rivals")
    (folder / "rotary.py").write_text(STAND_IN)
    process = subprocess.run(
        [sys.executable, "-c", (RIVALS if HAS_TOOLS else "print()") + COPY_KERNEL + CODE, folder],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.fixture(scope="module")
def result(lines):
    """Return what was recorded of third-party launches."""
    if not HAS_TOOLS:
        pytest.skip("this Triton comes without NVIDIA's tools")
    return json.loads(lines[0])


# -- Python's time ---------------------------------------------------------------------------------


def test_copy_kernel_accesses_16_bytes_at_a_time(lines):
    assert lines[1].split() == ["ld.global.v4.b32", "st.global.v4.b32"]


def test_parts_add_up_and_each_layer_launches_once(lines):
    *table, numbers = lines[2:]
    launches, times = json.loads(numbers)
    assert launches == 2 * 3 * 4
    for parts in times.values():
        best = {name: time["best"] for name, time in parts.items()}
        whole = sum(best[name] for name in ("norms", "rotate", "op", "launcher"))
        assert whole == pytest.approx(best["whole"])
        assert 0 < best["op"] < best["whole"] < best["transformers"]
    assert table[0] == "| µs a layer, best (median) | qwen3-8b | llama-3-8b |"
    assert len(table) == 2 + 7


# Most of transformers' time that a layer's norms and rotation may take in Python. docs/kernels.md
# has 0.20 and 0.31; noise adds.
HOST_BUDGETS = {"qwen3-8b": 0.3, "llama-3-8b": 0.45}
WHOLE_MODELS = """
import json
import torch
from machine_code import host_time
from rope_patch.benchmarks import SHAPES

torch.set_num_threads(1)
times = {name: host_time.measure(SHAPES[name], 40) for name in %s}
ratios = {n: parts["whole"].best / parts["transformers"].best for n, parts in times.items()}
print(json.dumps(ratios))
"""


@pytest.mark.slow
def test_python_of_a_decoded_token_keeps_its_budget():
    """Both are timed in turns in one process, on all layers; the best times count."""
    process = subprocess.run(
        [sys.executable, "-c", WHOLE_MODELS % list(HOST_BUDGETS)],
        env={**os.environ, "PYTHONPATH": python_path(), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    ratios = json.loads(process.stdout.splitlines()[-1])
    over = {name: ratio for name, ratio in ratios.items() if ratio > HOST_BUDGETS[name]}
    assert not over, f"of transformers' time, expected at most {HOST_BUDGETS}: {over}"


def test_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(sys, "argv", ["host_time"])
    with pytest.raises(SystemExit, match="1"):
        host_time.main()
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


# -- third-party launches --------------------------------------------------------------------------


def test_launches_are_recorded_as_they_are_chosen(result):
    constants = {"SIZE": 256, "FACTOR": 2}
    assert result["launches"] == [
        [[1, 32, 6, 128], [96], {"num_warps": 2}, constants, None],
        [[1, 32, 2, 128], [32], {"num_warps": 2}, constants, None],
    ]


def test_kernels_that_are_not_tritons_are_refused(result):
    assert result["refusal"] == "some of its kernels are not Triton's"


def test_programs_and_warps_count(result):
    """A program has the same instructions for 6 heads of queries and for 2 heads of keys."""
    assert list(result["comparisons"]) == ["small", "small, one token"]
    q, k = (Code(**code) for code in result["comparisons"]["small"]["flash-attention"])
    executed = sum(q.names.values()) - 1  # without the loop after the exit
    assert q.per_token == 2 * 3 * executed
    assert k.per_token == 2 * executed
    assert q.accesses == k.accesses == {"ld 64": 1, "st 64": 1}


def test_launches_are_added_up(result):
    comparisons = {
        name: {
            title: codes if isinstance(codes, str) else [Code(**code) for code in codes]
            for title, codes in comparison.items()
        }
        for name, comparison in result["comparisons"].items()
    }
    codes, alone = (x["flash-attention"] for x in comparisons.values())
    rows = format_comparison(comparisons).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == [OURS, "flash-attention"]
    cells = rows[1].split(" | ")
    assert cells[2] == "2"
    assert cells[6] == f"{sum(x.per_token for x in codes):,.0f}"
    assert cells[8] == f"{sum(x.microseconds for x in alone):.2f} µs |"


def test_missing_rivals_are_a_reason_instead_of_a_row(result):
    reasons = result["comparisons"]["small"]
    assert reasons["Liger"].startswith("liger_kernel")
    assert reasons["Unsloth"] == "no rope_embedding.py in the folder that --rivals names"
    codes = {"job": {OURS: "ours", "Other": "other is not installed"}}
    assert missing(codes)[-1] == "job, Other: other is not installed"
