"""Compile our kernels for a GPU and print what the machine code says about their speed.

No GPU is needed, and nothing is timed: `python -m rope_patch.benchmarks.kernels.machine_code`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import triton

from rope_patch.benchmarks.kernels.cross_compilation import (
    CACHE_KERNELS,
    NORM_KERNELS,
    TARGETS,
    Job,
    LaunchSpec,
    compile_launch,
    record_launch,
)
from rope_patch.benchmarks.kernels.sass import Instruction, Sass, estimate_cycles, walk

_QWEN: Any = {"head_dim": 128}
_GEMMA: Any = {"head_dim": 256, "heads": (16, 8)}
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
    "re-rotation": Job(kernel="re-rotation", head_dim=128),
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

# Bytes that an H200 moves in a second, the cycles of its clock, and its schedulers, each of which
# issues one instruction of a warp in a cycle.
_BYTES_PER_SECOND = 4.3e12
_CYCLES_PER_SECOND = 1.755e9
_SCHEDULERS = 132 * 4

_PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers
_MAX_PROGRAMS = 32  # on a multiprocessor

_AMD_KINDS = {"load": "ld", "store": "st"}
_AMD_BITS = {
    **{"dwordx4": 128, "dwordx2": 64, "dword": 32, "short": 16, "ushort": 16, "sshort": 16},
    **{"byte": 8, "ubyte": 8, "sbyte": 8},
}


@dataclass
class Code:
    """Machine code of a launch.

    Attributes:
        registers: Registers per thread.
        spilled: Bytes per thread of memory for registers that did not fit.
        warps: Warps per program.
        warps_per_sm: Warps that a multiprocessor, or compute unit, runs at once.
        grid: Programs along each dimension.
        constants: Constants that the kernel was compiled for.
        accesses: Number of accesses to global memory by kind and width in bits, such as "ld 128".
        names: How often each instruction is in the code; empty for AMD.
        per_token: Warp instructions for a token; None for AMD, for writes into a cache, whose
            programs have three paths, and for sums of weights.
        share: Share of an H200's issue slots, while it moves a token's bytes at full bandwidth.
        microseconds: Estimated time of the longest program in the kernel, for one token.
    """

    registers: int
    spilled: int
    warps: int
    warps_per_sm: int
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    accesses: dict[str, int]
    names: dict[str, int]
    per_token: float | None = None
    share: float | None = None
    microseconds: float | None = None


def read_code(job: Job, target: str) -> Code:
    """Compile a job's launch and read its code."""
    recorder = record_launch(job)
    compiled, spec = compile_launch(recorder, TARGETS[target]), recorder.spec
    if TARGETS[target].backend == "hip":
        return _read_amdgcn(compiled.asm["amdgcn"], spec)
    sass = Sass(compiled.asm["cubin"])
    code = Code(
        sass.registers,
        sass.stack,
        spec.warps,
        _count_warps(sass.registers, spec.warps),
        spec.grid,
        spec.constexprs,
        count_ptx_accesses(compiled.asm["ptx"]),
        sass.names(),
    )
    if job.kernel not in ("sum of weights", *CACHE_KERNELS):
        programs = list(_paths(job, spec, sass.instructions))
        code.per_token = spec.warps * sum(len(path) * count for path, count in programs)
        seconds = job.moved_bytes() / _BYTES_PER_SECOND
        code.share = code.per_token / (seconds * _CYCLES_PER_SECOND * _SCHEDULERS)
        if job.tokens == 1:
            cycles = max(estimate_cycles(path) for path, _ in programs)
            code.microseconds = cycles / _CYCLES_PER_SECOND * 1e6
    return code


def _paths(
    job: Job, spec: LaunchSpec, instructions: list[Instruction]
) -> Iterator[tuple[list[Instruction], float]]:
    """Yield the different programs' paths, each with the number of programs a token."""
    rows = spec.constexprs["HEADS"]
    q_tiles, k_tiles = (triton.cdiv(n, rows) for n in job.heads)
    if job.kernel == "re-rotation":
        yield list(walk(instructions, [k_tiles - 1] if k_tiles > 1 else [])), 1
    elif job.kernel.startswith("rope"):
        tiles = triton.cdiv(sum(job.heads), rows)
        trips = [] if spec.constexprs["ONE_TILE"] else [tiles - 1]
        yield list(walk(instructions, trips)), spec.grid[1]
    elif job.kernel == "norm" and spec.constexprs["ONE_TILE"]:
        yield list(walk(instructions, [])), q_tiles
        yield list(walk(instructions, [], True)), k_tiles
    elif job.kernel == "norm":
        trips = [] if job.norm_all_heads else [x for x in (q_tiles - 1, k_tiles) if x]
        yield list(walk(instructions, trips)), 1
    else:
        programs, _, shares = spec.grid
        tokens = triton.cdiv(job.tokens, programs)
        trips = [tokens, triton.cdiv(q_tiles, shares), tokens, triton.cdiv(k_tiles, shares)]
        for is_k in (False, True):
            yield list(walk(instructions, trips, is_k)), shares / tokens


def _count_warps(registers: int, warps: int) -> int:
    """Return how many warps of a program of so many warps fit on a multiprocessor at once."""
    per_warp = 32 * 8 * triton.cdiv(registers, 8)
    fitting = _PARTITIONS * (65536 // _PARTITIONS // per_warp)
    return warps * min(fitting // warps, _MAX_PROGRAMS)


def count_ptx_accesses(ptx: str) -> dict[str, int]:
    """Return the number of accesses to global memory by kind and width in bits."""
    found = re.findall(
        r"\b(ld|st)\.global(?:\.[a-zA-Z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx
    )
    return dict(Counter(f"{kind} {int(count or 1) * int(bits)}" for kind, count, bits in found))


def _read_amdgcn(text: str, spec: LaunchSpec) -> Code:
    """Read AMD's assembly, of which Triton has no disassembler: no instructions are counted."""
    numbers = {
        name: int(re.findall(rf"\.{name}:\s*(\d+)", text)[0])
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    }
    found = re.findall(r"^\s+(?:global|buffer)_(load|store)_([a-z]+\d?)(?:_|\s)", text, re.M)
    accesses = Counter(f"{_AMD_KINDS[kind]} {_AMD_BITS[width]}" for kind, width in found)
    vgprs = numbers["vgpr_count"]
    waves = 4 * min(512 // (8 * triton.cdiv(vgprs, 8)), 8)
    return Code(
        vgprs,
        numbers["private_segment_fixed_size"] + 4 * numbers["vgpr_spill_count"],
        spec.warps,
        spec.warps * (waves // spec.warps),
        spec.grid,
        spec.constexprs,
        dict(accesses),
        {},
    )


def format_table(codes: dict[str, Code]) -> str:
    """Return a Markdown table of codes by name."""
    lines = [
        "| launch | registers | warps per SM | instructions a token | share of issue slots "
        "| one token, estimated |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, code in codes.items():
        instructions = "" if code.per_token is None else f"{code.per_token:,.0f}"
        is_filling = code.share is not None and code.microseconds is None
        share = f"{code.share:.0%}" if is_filling else ""
        time = "" if code.microseconds is None else f"{code.microseconds:.2f} µs"
        cells = (name, code.registers, code.warps_per_sm, instructions, share, time)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m rope_patch.benchmarks.kernels.machine_code", description=__doc__
    )
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="default: sm_90 (H200)")
    parser.add_argument("--variants", action="store_true", help="other sizes instead of models")
    parser.add_argument("--json", action="store_true", help="print all that was read")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.exit(1, "Error: TRITON_INTERPRET is set, so Triton does not compile: unset it\n")
    jobs = VARIANT_JOBS if options.variants else MODEL_JOBS
    codes = {name: read_code(job, options.target) for name, job in jobs.items()}
    if options.json:
        json.dump({name: asdict(code) for name, code in codes.items()}, sys.stdout)
    else:
        print(format_table(codes))


if __name__ == "__main__":
    main()
