"""Read what the machine code of a launch says about its speed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton

from machine_code.cross_compilation import (
    ATTENTION_KERNELS,
    CACHE_KERNELS,
    TARGETS,
    Job,
    Launch,
    compile_launch,
    record_launch,
)
from machine_code.sass import Instruction, Sass, estimate_cycles, walk

# Bytes that an H200 moves in a second, the cycles of its clock, and its schedulers, each of which
# issues one instruction of a warp in a cycle.
_BYTES_PER_SECOND = 4.3e12
_CYCLES_PER_SECOND = 1.755e9
_SCHEDULERS = 132 * 4

_PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers
_MAX_PROGRAMS, _MAX_WARPS = 32, 64  # on a multiprocessor

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
        per_token: Warp instructions for a token of a layer; None for AMD, for writes into a
            cache, whose programs have three paths, and for sums of weights.
        share: Share of an H200's issue slots, while it moves a token's bytes at full bandwidth.
        microseconds: Estimated time of the longest program in the kernel, for one token.
    """

    registers: int
    spilled: int
    warps: int
    warps_per_sm: int
    grid: tuple[int, ...]
    constants: dict[str, Any]
    accesses: dict[str, int]
    names: dict[str, int]
    per_token: float | None = None
    share: float | None = None
    microseconds: float | None = None


def read_code(job: Job, target: str) -> Code:
    """Compile a job's launch and read its code."""
    launch = record_launch(job)
    code, instructions = read_launch(launch, target)
    if instructions and job.kernel not in ("sum of weights", *CACHE_KERNELS, *ATTENTION_KERNELS):
        count_instructions(code, job, list(_paths(job, launch, instructions)))
    return code


def read_launch(launch: Launch, target: str) -> tuple[Code, list[Instruction]]:
    """Compile a launch; return its code, and its instructions, none for AMD."""
    compiled = compile_launch(launch, TARGETS[target])
    warps = compiled.metadata.num_warps
    if TARGETS[target].backend == "hip":
        return _read_amdgcn(compiled.asm["amdgcn"], launch, warps), []
    sass = Sass(compiled.asm["cubin"])
    code = Code(
        sass.registers,
        sass.stack,
        warps,
        _count_warps(sass.registers, warps),
        launch.grid,
        launch.constants,
        count_ptx_accesses(compiled.asm["ptx"]),
        sass.names(),
    )
    return code, sass.instructions


def count_instructions(
    code: Code, job: Job, programs: list[tuple[list[Instruction], float]]
) -> None:
    """Fill in what the instructions of a token's programs tell.

    Args:
        code: The launch's code.
        job: What the launch is a part of, or all of.
        programs: The different programs' paths, each with the number of programs a token.
    """
    code.per_token = code.warps * sum(len(path) * count for path, count in programs)
    seconds = job.moved_bytes() / _BYTES_PER_SECOND
    code.share = code.per_token / (seconds * _CYCLES_PER_SECOND * _SCHEDULERS)
    if job.tokens == 1:
        cycles = max(estimate_cycles(path) for path, _ in programs)
        code.microseconds = cycles / _CYCLES_PER_SECOND * 1e6


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


def format_attention_table(codes: dict[str, dict[str, Code]]) -> str:
    """Return a Markdown table of attention's codes by name and target."""
    lines = [
        "| launch | target | rows, keys of a tile | registers | spilled, bytes | warps per SM |",
        "|:--|:--|--:|--:|--:|--:|",
    ]
    for name, targets in codes.items():
        for target, code in targets.items():
            tile = f"{code.constants['M']}, {code.constants['N']}"
            cells = (name, target, tile, code.registers, code.spilled, code.warps_per_sm)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _paths(
    job: Job, launch: Launch, instructions: list[Instruction]
) -> Iterator[tuple[list[Instruction], float]]:
    """Yield the different programs' paths, each with the number of programs a token."""
    rows = launch.constants["HEADS"]
    q_tiles, k_tiles = (triton.cdiv(n, rows) for n in job.heads)
    if job.kernel == "re-rotation":
        trips = launch.constants["TILES"] - 1
        path = list(walk(instructions, [trips] if trips else []))
        yield path, launch.grid[1] / job.layers
    elif job.kernel.startswith("rope"):
        tiles = triton.cdiv(sum(job.heads), rows)
        trips = [] if launch.constants["ONE_TILE"] else [tiles - 1]
        yield list(walk(instructions, trips)), launch.grid[1]
    elif job.kernel == "norm" and launch.constants["ONE_TILE"]:
        yield list(walk(instructions, [])), q_tiles
        yield list(walk(instructions, [], True)), k_tiles
    elif job.kernel == "norm":
        trips = [] if job.norm_all_heads else [x for x in (q_tiles - 1, k_tiles) if x]
        yield list(walk(instructions, trips)), 1
    else:
        programs, _, shares = launch.grid
        tokens = triton.cdiv(job.tokens, programs)
        trips = [tokens, triton.cdiv(q_tiles, shares), tokens, triton.cdiv(k_tiles, shares)]
        for is_k in (False, True):
            yield list(walk(instructions, trips, is_k)), shares / tokens


def _count_warps(registers: int, warps: int) -> int:
    """Return how many warps of a program of so many warps fit on a multiprocessor at once."""
    per_warp = 32 * 8 * triton.cdiv(registers, 8)
    fitting = _PARTITIONS * (65536 // _PARTITIONS // per_warp)
    return warps * min(fitting // warps, _MAX_PROGRAMS, _MAX_WARPS // warps)


def count_ptx_accesses(ptx: str) -> dict[str, int]:
    """Return the number of accesses to global memory by kind and width in bits."""
    found = re.findall(
        r"\b(ld|st)\.global(?:\.[a-zA-Z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx
    )
    return dict(Counter(f"{kind} {int(count or 1) * int(bits)}" for kind, count, bits in found))


def _read_amdgcn(text: str, launch: Launch, warps: int) -> Code:
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
        warps,
        warps * (waves // warps),
        launch.grid,
        launch.constants,
        dict(accesses),
        {},
    )
