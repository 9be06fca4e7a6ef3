"""Compare our machine code with that of third-party kernels for the same jobs.

Their own Python chooses what is launched. The launch is recorded instead of done, with tensors on
PyTorch's meta device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from machine_code.cross_compilation import Job, Launch
from machine_code.launch_code import (
    Code,
    count_instructions,
    read_code,
    read_launch,
)
from machine_code.sass import Instruction, walk
from rope_patch.benchmarks import (
    VIEWS,
    Implementation,
    OperatorCount,
    Problem,
    Shape,
    Unavailable,
    describe_error,
    third_party_implementations,
)

OURS = "rope_patch"

# FLA is left out, because it chooses its launch by timing several on a GPU.
_RIVALS = ("liger", "flash-attn", "unsloth")

_ONE_TOKEN = "{}, one token"

# The code of each launch by title, or the reason why there is none.
Comparison = dict[str, "list[Code] | str"]


def compare(jobs: dict[str, Job], target: str, folder: Path) -> dict[str, Comparison]:
    """Return our code and theirs for each job, and for the same job with one token.

    Args:
        jobs: Jobs of "rope" or "norm", by name.
        target: A name in `TARGETS`.
        folder: Folder with the files of third-party implementations.
    """
    all_jobs = dict(jobs)
    for name, job in jobs.items():
        all_jobs[_ONE_TOKEN.format(name)] = replace(job, tokens=1)
    rivals = [x for x in third_party_implementations(folder) if x.name in _RIVALS]
    comparisons: dict[str, Comparison] = {}
    for name, job in all_jobs.items():
        comparisons[name] = {OURS: [read_code(job, target)]}
        for rival in rivals:
            comparisons[name][rival.title] = _read_rival(rival, job, target)
    return comparisons


def _read_rival(rival: Implementation, job: Job, target: str) -> list[Code] | str:
    """Return the code of each launch of a third-party implementation, or why there is none."""
    try:
        launches = record_rival(rival, job)
    except (Unavailable, ImportError) as error:
        return describe_error(error)
    codes = []
    for launch in launches:
        code, instructions = read_launch(launch, target)
        if instructions:
            count_instructions(code, job, _programs(job, launch, instructions))
        codes.append(code)
    return codes


def record_rival(rival: Implementation, job: Job) -> list[Launch]:
    """Return what a third-party implementation would launch for a job of "rope" or "norm".

    Raises:
        Unavailable: It cannot do the job, or it launches kernels that are not Triton's.
        ImportError: It is not installed.
    """
    is_norm = job.kernel == "norm"
    shape = Shape(
        name="",
        family="",
        heads=job.heads[0],
        key_heads=job.heads[1],
        head_dim=job.head_dim,
        layers=1,
        theta=1e4,
        norm="norm" if is_norm else None,
        offset=job.offset if is_norm else 0.0,
    )
    problem = Problem(
        shape=shape,
        batch=1,
        length=job.tokens,
        layout=VIEWS,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
    )
    call, launches, operators = rival.build(problem), list[Launch](), OperatorCount()

    def record(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append(_bind(kernel, values, named, grid))

    q, k = (
        torch.empty(1, job.tokens, n, job.head_dim, dtype=problem.dtype, device=problem.device)
        for n in job.heads
    )
    unwrapped = mock.patch.object(torch.library, "wrap_triton", lambda kernel: kernel)
    with mock.patch.object(JITFunction, "run", record), unwrapped, operators, torch.no_grad():
        call(q, k)
    if operators.count:
        raise Unavailable("some of its kernels are not Triton's")
    return launches


def _bind(kernel: Any, values: tuple[Any, ...], named: dict[str, Any], grid: Any) -> Launch:
    """Return a launch from what Triton is called with."""
    names = set(kernel.arg_names)
    bound = kernel.signature.bind(*values, **{k: v for k, v in named.items() if k in names})
    bound.apply_defaults()
    options = {k: v for k, v in named.items() if k not in names}
    return Launch(
        kernel, bound.arguments, grid(bound.arguments) if callable(grid) else grid, options
    )


def _programs(
    job: Job, launch: Launch, instructions: list[Instruction]
) -> list[tuple[list[Instruction], float]]:
    """Return the different programs' paths, each with the number of programs a token.

    If one launch has both queries and keys, and its code has a branch, then programs of keys take
    the branch, and those of queries do not.
    """
    count = math.prod(launch.grid) / job.tokens
    queries = list(walk(instructions, []))
    sizes = {x.numel() for x in launch.arguments.values() if isinstance(x, torch.Tensor)}
    if not sizes.issuperset(job.tokens * n * job.head_dim for n in job.heads):
        return [(queries, count)]
    keys = list(walk(instructions, [], takes_first_branch=True))
    if queries == keys:
        return [(queries, count)]
    if not all(any(x.name.startswith("STG") for x in path) for path in (queries, keys)):
        raise ValueError(f"{launch.kernel.__name__} has a branch that is not understood")
    keys_count = max(round(count * job.heads[1] / sum(job.heads)), 1)
    return [(queries, count - keys_count), (keys, keys_count)]


def format_comparison(comparisons: dict[str, Comparison]) -> str:
    """Return a Markdown table, without those that are not there."""
    lines = [
        "| launch | whose | launches | registers | warps per SM | writes, bits "
        "| instructions a token | share of issue slots | one token, estimated |",
        "|:--|:--|--:|--:|--:|:--|--:|--:|--:|",
    ]
    for name, comparison in comparisons.items():
        one_token = comparisons.get(_ONE_TOKEN.format(name))
        if one_token is None:
            continue
        for title, codes in comparison.items():
            alone = one_token[title]
            if not isinstance(codes, str) and not isinstance(alone, str):
                lines.append(f"| {' | '.join((name, title, *_cells(codes, alone)))} |")
    return "\n".join(lines)


def _cells(codes: list[Code], one_token: list[Code]) -> tuple[str, ...]:
    writes = {int(kind.split()[1]) for x in codes for kind in x.accesses if kind.startswith("st")}
    return (
        str(len(codes)),
        str(max(x.registers for x in codes)),
        str(min(x.warps_per_sm for x in codes)),
        ", ".join(map(str, sorted(writes, reverse=True))),
        _total([x.per_token for x in codes], "{:,.0f}"),
        _total([x.share for x in codes], "{:.0%}"),
        _total([x.microseconds for x in one_token], "{:.2f} µs"),
    )


def _total(numbers: list[float | None], form: str) -> str:
    known = [x for x in numbers if x is not None]
    return form.format(sum(known)) if len(known) == len(numbers) else ""


def missing(comparisons: dict[str, Comparison]) -> list[str]:
    """Return a line for each row that is not there, with the reason."""
    return [
        f"{name}, {title}: {codes}"
        for name, comparison in comparisons.items()
        for title, codes in comparison.items()
        if isinstance(codes, str)
    ]
