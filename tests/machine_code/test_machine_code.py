"""Test the kernels' machine code for GPUs: registers, accesses, instructions and waits.

No GPU is needed. `PYTHONPATH=tests python -m machine_code --json` prints the input.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.processes import python_path

pytest.importorskip("triton")

from machine_code.cross_compilation import ATTENTION_JOBS, MODEL_JOBS, VARIANT_JOBS
from machine_code.launch_code import Code, format_table
from machine_code.rival_code import OURS, format_comparison
from machine_code.sass import TOOLS

DOCS = Path(__file__).parents[2] / "docs"
NVIDIA, AMD = ("sm_80", "sm_90", "sm_100"), "gfx942"
JOBS = MODEL_JOBS | VARIANT_JOBS

pytestmark = pytest.mark.skipif(
    not (TOOLS / "nvdisasm").is_file(), reason="this Triton comes without NVIDIA's tools"
)

RELEASE = ".".join(version("triton").split(".")[:2])
documented = pytest.mark.skipif(
    RELEASE != "3.7", reason="docs/kernels.md has what Triton 3.7 makes of the kernels"
)

# Limits, of 255 registers: up to 72, a multiprocessor runs 28 programs of one warp at once, up to
# 96 it runs 20, up to 128 it runs 16, up to 168 it runs 12.
REGISTERS = {
    "rope": 72,
    "norm": 96,
    "norm backwards": 128,
    "norm backwards by output": 168,
    "norm backwards, frozen": 128,
}
VARIANT_REGISTERS = {
    "rope": 96,
    "rope backwards": 80,
    "re-rotation": 80,
    "norm": 104,
    "norm backwards": 136,
    "norm backwards by output": 184,
    "norm backwards, frozen": 136,
    "rope into a cache": 72,
    "norm into a cache": 96,
    "sum of weights": 64,
}
EXCEPTIONS = {
    # All heads of a token, with as many sums: two programs of 4 warps.
    **{(target, "OLMo 2 7B, norm backwards"): 248 for target in (*NVIDIA, AMD)},
    # 12 programs at once. Tuned by times on sm_90.
    ("sm_80", "Gemma 3 12B, norm backwards"): 168,
    ("sm_80", "norm backwards, 256, halves"): 168,
    ("sm_100", "Qwen3 8B, norm backwards, frozen"): 144,
    ("sm_100", "norm backwards, frozen, 128, halves"): 144,
}
if RELEASE in ("3.8", "3.9"):  # they take more, and nothing was timed with them
    EXCEPTIONS |= {
        ("sm_80", "OLMo 2 7B, norm backwards"): 255,
        ("sm_80", "Qwen3 8B, norm backwards"): 168,
        ("sm_80", "norm backwards, 128, halves"): 168,
        ("sm_90", "Gemma 3 12B, norm backwards"): 160,
        ("sm_90", "norm backwards, 256, halves"): 160,
        ("sm_90", "norm backwards, frozen, 64, halves"): 144,
        ("sm_90", "norm, 64, halves"): 112,
        ("sm_100", "Qwen3 8B, norm backwards"): 144,
        ("sm_100", "Gemma 3 12B, norm backwards"): 144,
        ("sm_100", "norm backwards, 128, halves"): 144,
        ("sm_100", "norm backwards, 256, halves"): 144,
    }

# Bytes, where a release has no register for them.
SPILLED = {("3.8", "sm_90", "norm backwards by output, 64, neighbours"): 8}

# Bytes that attention at mapped positions may spill, by what the job's name ends with: its key
# gradients have more sums than registers, and heads of 256 dimensions fill a tile.
ATTENTION_SPILLED = {"Gemma 3 12B, a prompt": 256, "one token": 32, "gradient of keys": 700}

# Above 70%, a kernel cannot reach the memory's bandwidth.
SHARES = {"Llama": 0.5, "Qwen3": 0.5, "Gemma": 0.5, "SmolLM2": 0.7, "OLMo": 0.7}

# In microseconds: a read more in a row takes 0.16, a division of integers 0.07.
ONE_TOKEN = {
    "Llama 3 8B, rope, one token": 0.34,
    "SmolLM2 135M, rope, one token": 0.34,
    "Qwen3 8B, norm, one token": 0.5,
    "Gemma 3 12B, norm, one token": 0.6,
}

# The best rival at each of these, and how many times as long as it ours may take: its angles are
# computed beforehand.
GOALS = {
    "Qwen3 8B, norm, one token": ("Unsloth", 1),
    "Llama 3 8B, rope, one token": ("Liger", 2),
    "Gemma 3 12B, rope, one token": ("Liger", 2),
    "SmolLM2 135M, rope, one token": ("Liger", 2),
}
RIVALS = os.environ.get("RIVALS", "out/rivals/files")  # a folder as for `rope-patch bench --rivals`

BFLOAT16, ACCESS = 2, 16


on_nvidia = pytest.mark.parametrize(
    "target",
    [pytest.param(x, marks=() if x == "sm_90" else pytest.mark.slow) for x in NVIDIA],
)


def cases(targets, select=lambda job: True):
    """Parametrise by target and name; other sizes, and other targets than sm_90, are slow."""
    return pytest.mark.parametrize(
        ("target", "name"),
        [
            pytest.param(
                target,
                name,
                id=f"{target}-{name}",
                marks=pytest.mark.slow if name in VARIANT_JOBS or target != "sm_90" else (),
            )
            for target in targets
            for name, job in JOBS.items()
            if select(job)
        ],
    )


@pytest.fixture(scope="module")
def run_command(tmp_path_factory):
    """Return a function that runs the command for a target; the first worker does so for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    @cache
    def run(target, *options):
        name = "".join(x.strip("-") for x in options if x.startswith("-"))
        output_file = folder / f"machine_code-{name}-{target}.json"
        with FileLock(output_file.with_suffix(".lock")):
            if not output_file.exists():
                env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
                env["PYTHONPATH"] = python_path()
                command = [sys.executable, "-m", "machine_code", "--json", "--target", target]
                command += options
                result = subprocess.run(command, env=env, capture_output=True, text=True)
                assert result.returncode == 0, result.stderr
                output_file.write_text(result.stdout)
        return json.loads(output_file.read_text())

    return run


@pytest.fixture(scope="module")
def compile_jobs(run_command):
    """Return a function that returns the code of all jobs for a target."""

    @cache
    def run(target, *options):
        return {name: Code(**code) for name, code in run_command(target, *options).items()}

    return run


@pytest.fixture(scope="module")
def compile_rivals(run_command):
    """Return a function that compares with third-party kernels for a target."""

    @cache
    def run(target):
        return {
            name: {
                title: codes if isinstance(codes, str) else [Code(**code) for code in codes]
                for title, codes in comparison.items()
            }
            for name, comparison in run_command(target, "--rivals", RIVALS).items()
        }

    return run


@pytest.fixture
def code(compile_jobs, target, name):
    return compile_jobs(target, *(["--variants"] if name in VARIANT_JOBS else []))[name]


def whole_tiles(code, kernel, threads):
    """Return a thread's number of 16-byte accesses to a tile, and the tiles that have code."""
    c = code.constants
    accesses = c["HEADS"] * 2 * c["PAIRS"] * BFLOAT16 / (ACCESS * threads * code.warps)
    if kernel.endswith("into a cache"):  # queries and keys
        return accesses, 2 if c["ONE_TILE"] or c["NORM_ALL_HEADS"] else 4
    if kernel == "re-rotation":
        return accesses, min(c["TILES"], 2)
    if kernel.startswith("rope") and c["ONE_TILE"]:
        return accesses, 1
    return accesses, 2  # the first and the others, or queries and keys


@cases((*NVIDIA, AMD))
def test_no_registers_are_spilled(target, name, code, record_property):
    record_property("registers", code.registers)
    spilled = SPILLED.get((RELEASE, target, name), 0)
    assert code.spilled == spilled
    assert spilled or not [x for x in code.names if x.startswith(("LDL", "STL"))]
    limits = REGISTERS if name in MODEL_JOBS else VARIANT_REGISTERS
    assert code.registers <= EXCEPTIONS.get((target, name), limits[JOBS[name].kernel])


@pytest.mark.slow
@documented
@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("name", ATTENTION_JOBS)
def test_attention_spills_no_more_than_is_said(target, name, compile_jobs):
    code = compile_jobs(target, "--attention")[name]
    limits = [limit for end, limit in ATTENTION_SPILLED.items() if name.endswith(end)]
    assert code.spilled <= max(limits, default=0)
    assert any(kind.startswith(("HMMA", "HGMMA", "UTCHMMA")) for kind in code.names)
    cells = (name, target, f"{code.constants['M']}, {code.constants['N']}", code.registers)
    row = f"| {' | '.join(map(str, (*cells, code.spilled, code.warps_per_sm)))} |"
    assert row in (DOCS / "kernels.md").read_text()


@cases(NVIDIA, lambda job: job.kernel != "sum of weights" and job.tokens > 1)
def test_heads_are_read_and_written_16_bytes_at_a_time(target, name, code):
    job = JOBS[name]
    accesses, tiles = whole_tiles(code, job.kernel, threads=32)
    assert accesses >= 1
    backwards = job.kernel.startswith("norm backwards")
    wide = {kind: code.accesses.get(f"{kind} 128", 0) for kind in ("ld", "st")}
    if job.kernel.endswith("into a cache"):  # values, too
        c = code.constants
        values = c["VALUE_HEADS"] * c["VALUE_DIM"] * BFLOAT16 / (ACCESS * 32 * code.warps)
        assert values >= 1
        assert wide["st"] >= tiles * accesses + values
    assert wide["ld"] >= tiles * accesses * (2 if backwards else 1)
    assert wide["st"] >= tiles * accesses
    # The assembled code has the same number of instructions.
    assert code.names["LDG.E.128"] == wide["ld"]
    assert code.names["STG.E.128"] == wide["st"]
    narrow = {"ld": 0, "st": 0}
    for access, count in code.accesses.items():
        kind, bits = access.split()
        # Positions and frequencies are integers of 64 bits; the attention factor has 32.
        if int(bits) < 128 and (kind, bits) != ("ld", "64"):
            narrow[kind] += count * int(bits) // 8
    if not job.kernel.startswith("norm"):
        assert narrow["ld"] <= 4
        assert narrow["st"] == 0
    elif not job.norm_all_heads:
        # A thread reads its part of both weight vectors, writes their gradients in float32, and
        # reads and writes reciprocal norms one at a time.
        weights = 2 * code.constants["D"] // 32
        heads = 8 if job.kernel == "norm backwards, frozen" else 4
        assert narrow["ld"] <= weights * BFLOAT16 + heads * 4
        assert narrow["st"] <= weights * 4 + 2 * 4


@cases([AMD], lambda job: job.kernel != "sum of weights" and job.tokens > 1 and not job.interleaved)
def test_amd_reads_and_writes_heads_16_bytes_at_a_time(target, name, code):
    """Except where 64 threads get 8 bytes each of either half of the pairs."""
    job = JOBS[name]
    accesses, tiles = whole_tiles(code, job.kernel, threads=64)
    if accesses / 2 < 1:
        assert code.accesses["ld 64"] >= tiles
        assert code.accesses["st 64"] >= tiles
        return
    if job.kernel.endswith("into a cache"):  # queries and keys share the code of some stores
        assert code.accesses["st 128"] >= accesses
        assert {access for access in code.accesses if access.startswith("st")} == {"st 128"}
        return
    assert code.accesses["ld 128"] >= tiles * accesses
    assert code.accesses["st 128"] >= tiles * accesses
    assert code.accesses.get("st 16", 0) == 0


@cases(NVIDIA, lambda job: job.kernel != "sum of weights")
def test_positions_and_frequencies_are_read_once(target, name, code):
    """One read serves all heads; programs of queries and of keys have code of their own."""
    if JOBS[name].layers > 1:
        pytest.skip("addresses of layers have as many bits")
    frequencies = max(code.constants["PAIRS"] // 32, 1)
    kernel = JOBS[name].kernel
    separate = kernel.startswith("norm backwards") or kernel.endswith("into a cache")
    separate = separate or (kernel == "norm" and code.constants["ONE_TILE"])
    limit = (2 if separate else 1) * (max(frequencies, 8) + 2)  # 8 if a thread's are neighbours
    assert code.accesses["ld 64"] <= limit


@cases(NVIDIA, lambda job: job.kernel == "sum of weights")
def test_sums_of_weights_read_16_bytes_at_a_time(target, name, code):
    assert code.names["LDG.E.128"] >= 1
    assert {access for access in code.accesses if access.startswith("ld")} == {"ld 128"}


@on_nvidia
@pytest.mark.parametrize("name", [name for name, job in MODEL_JOBS.items() if job.tokens > 1])
def test_instructions_leave_the_bandwidth_free(target, name, code, record_property):
    record_property("share", code.share)
    limit = next(x for model, x in SHARES.items() if name.startswith(model))
    assert 0.05 < code.share < limit


@cases(NVIDIA, lambda job: job.kernel == "re-rotation" and job.layers > 1)
def test_layers_share_angles_and_tiles(target, name, code, record_property):
    """One layer alone takes 77% of the issue slots, a narrow one 158%."""
    record_property("share", code.share)
    assert code.constants["TILES"] > 1
    assert code.share < 0.75


@on_nvidia
@pytest.mark.parametrize("name", ONE_TOKEN)
def test_one_token_waits_for_memory_once(target, name, code, record_property):
    """Heads are read before the angles are computed, and keys beside queries."""
    record_property("microseconds", code.microseconds)
    assert 0.2 < code.microseconds < ONE_TOKEN[name]
    assert code.warps_per_sm >= 32


@on_nvidia
@pytest.mark.parametrize("name", ONE_TOKEN)
def test_a_thread_has_few_pairs_of_one_token(target, name, code):
    """One pair; with norms a warp has one head, so that no warp waits for another one's sum."""
    if JOBS[name].kernel == "norm":
        assert code.constants["HEADS"] == code.warps == 4
    else:
        assert code.constants["HEADS"] == 1
        assert code.constants["PAIRS"] == 32 * code.warps
        assert code.names["STG.E.U16"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("name", GOALS)
def test_one_token_takes_no_longer_than_a_rival(target, name, compile_rivals):
    rival, times = GOALS[name]
    codes = compile_rivals(target)[name]
    if isinstance(codes[rival], str):
        pytest.skip(f"{rival}: {codes[rival]}")
    ours, theirs = (sum(x.microseconds for x in codes[title]) for title in (OURS, rival))
    assert ours <= times * theirs


@pytest.mark.slow
@documented
def test_comparison_in_docs_is_what_the_command_prints(compile_rivals):
    comparisons = compile_rivals("sm_90")
    for title, codes in comparisons["Llama 3 8B, rope"].items():
        if isinstance(codes, str):
            pytest.skip(f"{title}: {codes}")
    require_in_docs(format_comparison(comparisons))


@documented
def test_table_in_docs_is_what_the_command_prints(compile_jobs):
    require_in_docs(format_table(compile_jobs("sm_90")))


def require_in_docs(table):
    """Compare; versions of Triton differ by a few instructions, so by a hundredth of the slots."""
    docs = (DOCS / "kernels.md").read_text()
    printed = table.splitlines()
    start = docs.splitlines().index(printed[0])
    documented = docs.splitlines()[start : start + len(printed)]
    for row, expected in zip(documented, printed, strict=True):
        assert re.sub(r"[\d.,]+", "", row) == re.sub(r"[\d.,]+", "", expected)
        numbers, truth = (
            [float(x.replace(",", "")) for x in re.findall(r"\d[\d.,]*", line.split("|", 2)[2])]
            for line in (row, expected)
        )
        assert numbers == pytest.approx(truth, rel=0.1)
