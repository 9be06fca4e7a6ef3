"""Test the kernels' machine code for GPUs: wide memory accesses, and no register spills.

No GPU is needed. `python tests/ops/triton_kernels/machine_code.py` prints the input of these tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("triton")

import triton
from machine_code import JOBS, OTHER_JOBS, SUM_JOBS, Code

SCRIPT = Path(__file__).with_name("machine_code.py")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

pytestmark = pytest.mark.skipif(
    not (TOOLS / "nvdisasm").is_file(), reason="this Triton comes without NVIDIA's tools"
)

# Limits, of 255 registers: up to 128, a multiprocessor runs 16 programs of one warp at once.
REGISTERS = {
    "rope": 96,
    "rope backwards": 80,
    "re-rotation": 80,
    "norm": 104,
    "norm backwards": 136,
    "norm backwards by output": 184,
    "norm backwards, frozen": 120,
}

# Where a program holds all heads of a token, with as many sums in the backward pass.
REGISTERS_TOGETHER = {"norm, together": 96, "norm backwards, together": 232}

BYTES = {"b16": 2, "b32": 4, "v2.b32": 8, "v4.b32": 16, "b64": 8}
BFLOAT16, ACCESS, WARP = 2, 16, 32


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory):
    """Return the script's output; the first worker runs it once for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    output_file = folder / "machine_code.json"
    with FileLock(output_file.with_suffix(".lock")):
        if not output_file.exists():
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            command = [sys.executable, SCRIPT]
            result = subprocess.run(command, env=env, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            output_file.write_text(result.stdout)
    return json.loads(output_file.read_text())


@pytest.fixture
def code(compiled_kernels, name):
    return Code(**compiled_kernels["H200"][name])


jobs = pytest.mark.parametrize("name", JOBS)


def accesses_per_tile(code):
    """Return the number of a thread's 16-byte accesses to a whole tile of x."""
    c = code.constants
    return c["HEADS"] * 2 * c["PAIRS"] * BFLOAT16 // (ACCESS * WARP * code.warps)


@jobs
def test_no_registers_are_spilled(name, code, record_property):
    record_property("registers", code.registers)
    assert code.stack == 0
    assert not [x for x in code.instructions if x.startswith(("LDL", "STL"))]
    assert code.registers <= REGISTERS_TOGETHER.get(name, REGISTERS[JOBS[name]["kernel"]])


@jobs
def test_heads_are_read_and_written_16_bytes_at_a_time(name, code):
    kernel, tile = JOBS[name]["kernel"], accesses_per_tile(code)
    assert tile >= 1
    both = 1 if kernel == "re-rotation" else 2  # queries and keys
    backwards = kernel.startswith("norm backwards")
    wide = {kind: code.accesses.get(f"{kind} v4.b32", 0) for kind in ("ld", "st")}
    assert wide["ld"] >= both * tile * (2 if backwards else 1)
    assert wide["st"] >= both * tile
    # The assembled code has the same number of instructions.
    assert code.instructions["LDG.E.128"] == wide["ld"]
    assert code.instructions["STG.E.128"] == wide["st"]
    narrow = {
        kind: sum(
            count * BYTES[width]
            for access, count in code.accesses.items()
            for k, width in [access.split()]
            if k == kind and width not in ("v4.b32", "b64")  # positions and frequencies are b64
        )
        for kind in ("ld", "st")
    }
    if not kernel.startswith("norm"):
        assert narrow == {"ld": 0, "st": 0}
        return
    # A thread reads its part of both weight vectors, writes their gradients in float32, and reads
    # and writes reciprocal norms one at a time.
    weights = 2 * code.constants["D"] // WARP
    assert narrow["ld"] <= weights * BFLOAT16 + 4 * 4
    assert narrow["st"] <= weights * 4 + 2 * 4


@jobs
def test_positions_and_frequencies_are_read_once(name, code):
    """One read serves all heads; the norm's backward has separate programs for queries and keys."""
    frequencies = max(code.constants["PAIRS"] // WARP, 1)
    programs = 2 if "norm backwards" in name else 1
    limit = programs * (max(frequencies, 8) + 2)  # 8 if a thread's pairs are neighbours
    assert code.accesses["ld b64"] <= limit


@pytest.mark.parametrize("name", SUM_JOBS)
def test_sums_of_weights_read_16_bytes_at_a_time(name, code):
    assert code.stack == 0
    assert code.registers <= 64
    assert code.instructions["LDG.E.128"] >= 1
    assert {access for access in code.accesses if access.startswith("ld")} == {"ld v4.b32"}


@pytest.mark.parametrize("kernel", OTHER_JOBS)
def test_kernels_compile_for_amd(compiled_kernels, kernel):
    assert {"amdgcn", "hsaco"} <= set(compiled_kernels["MI300"][kernel])
