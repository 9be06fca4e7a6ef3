"""Machine code of the kernels for GPUs: wide memory accesses, and no register spills.

No GPU is needed. `python tests/ops/kernels/machine_code.py` prints the input of these tests.
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
from machine_code import JOBS, OTHER_JOBS, Code

SCRIPT = Path(__file__).with_name("machine_code.py")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

pytestmark = pytest.mark.skipif(
    not (TOOLS / "nvdisasm").is_file(), reason="this Triton comes without NVIDIA's tools"
)

# Of 255 that there are: up to 128, 16 programs of a warp run at once on a multiprocessor.
REGISTERS = {
    "rope": 96,
    "rope backwards": 80,
    "re-rotation": 80,
    "norm": 104,
    "norm backwards": 136,
    "norm backwards by output": 184,
}

BYTES = {"b16": 2, "b32": 4, "v2.b32": 8, "v4.b32": 16, "b64": 8}
BFLOAT16, ACCESS, WARP = 2, 16, 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the script's output; the first worker runs it once for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    answer = folder / "machine_code.json"
    with FileLock(answer.with_suffix(".lock")):
        if not answer.exists():
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            answer.write_text(done.stdout)
    return json.loads(answer.read_text())


@pytest.fixture
def code(made, name):
    return Code(**made["H200"][name])


jobs = pytest.mark.parametrize("name", JOBS)


def for_each_tile(code):
    """Return a thread's accesses to a whole tile of x, at 16 bytes each."""
    c = code.constants
    return c["HEADS"] * 2 * c["PAIRS"] * BFLOAT16 // (ACCESS * WARP * code.warps)


@jobs
def test_nothing_is_spilled(name, code, record_property):
    record_property("registers", code.registers)
    assert code.stack == 0
    assert not [x for x in code.instructions if x.startswith(("LDL", "STL"))]
    assert code.registers <= REGISTERS[JOBS[name]["kernel"]]


@jobs
def test_heads_are_read_and_written_16_bytes_at_a_time(name, code):
    kernel, tile = JOBS[name]["kernel"], for_each_tile(code)
    assert tile >= 1
    both = 1 if kernel == "re-rotation" else 2  # queries and keys
    backwards = kernel.startswith("norm backwards")
    wide = {kind: code.accesses.get(f"{kind} v4.b32", 0) for kind in ("ld", "st")}
    assert wide["ld"] >= both * tile * (2 if backwards else 1)
    assert wide["st"] >= both * tile
    # And by as many instructions, whatever they were assembled to.
    assert code.instructions["LDG.E.128"] == wide["ld"]
    assert code.instructions["STG.E.128"] == wide["st"]
    narrow = {
        kind: sum(
            count * BYTES[width]
            for access, count in code.accesses.items()
            for k, width in [access.split()]
            if k == kind and width not in ("v4.b32", "b64")  # which positions and turns are
        )
        for kind in ("ld", "st")
    }
    if not kernel.startswith("norm"):
        assert narrow == {"ld": 0, "st": 0}
        return
    # Weights, a vector for queries and one for keys, of which a thread reads its part, and writes
    # their gradients in float32; and reciprocal norms, one at a time.
    of_weights = 2 * code.constants["D"] // WARP
    assert narrow["ld"] <= of_weights * BFLOAT16 + 4 * 4
    assert narrow["st"] <= of_weights * 4 + 2 * 4


@jobs
def test_positions_and_turns_are_read_once(name, code):
    """Check one read for all heads; backwards, queries and keys are in different programs."""
    turns = max(code.constants["PAIRS"] // WARP, 1)
    times = 2 if "norm backwards" in name else 1
    limit = times * (max(turns, 8) + 2)  # 8 where a thread's pairs are neighbours
    assert code.accesses["ld b64"] <= limit


@pytest.mark.parametrize("kernel", OTHER_JOBS)
def test_kernels_compile_for_amd(made, kernel):
    assert {"amdgcn", "hsaco"} <= set(made["MI300"][kernel])
