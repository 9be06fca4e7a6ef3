"""The measurement: every problem, every contender, in turns.

A time counts beside that of a copy of as many bytes, taken milliseconds apart: nothing that reads
queries and keys and writes them again is faster than that.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rope_patch.benchmarks.kernels import model_steps, timing
from rope_patch.benchmarks.kernels.ground_truth import TOLERANCES
from rope_patch.benchmarks.kernels.implementations import (
    Implementation,
    auto_implementation,
    builtin_implementations,
    describe_error,
)
from rope_patch.benchmarks.kernels.shapes import (
    BHSD,
    PACKED,
    SHAPES,
    VIEWS,
    Problem,
    Shape,
    samples_needed,
)
from rope_patch.benchmarks.kernels.third_party import third_party_implementations
from rope_patch.benchmarks.kernels.workers import (
    BOTH,
    FORWARD,
    GRAPH,
    TRAINING,
    WALL,
    CopyBaseline,
    ImplementationRun,
    TimedCalls,
)
from rope_patch.evaluation.measures.timed_method import compare_times
from rope_patch.ops.dispatch import is_interpreted
from rope_patch.utils import provenance
from rope_patch.utils.progress import progress_bar
from rope_patch.utils.versions import version

COPY = "copy"

_LENGTHS = {"cuda": (1, 128, 1024, 8192, 32768, 131072), "cpu": (1, 128, 1024)}
_BATCHES = {"cuda": (1, 4), "cpu": (1,)}
_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
_REPEATS = {"cuda": 20, "cpu": 5}
_SAVED_LENGTH = {"cuda": 8192, "cpu": 64}  # tokens
_PACKAGES = ("triton", "liger-kernel", "fla-core")
_STEP_REPEATS = 5  # at most: each is of many tokens
_LAYOUTS_MAX_LENGTH = 8192  # tokens; the layouts are compared at the longest length up to there

# What a problem needs, as multiples of N: for each sample with its copies, and for who works on it.
# On a GPU one that needs more is told so; elsewhere the process would end, so that is for the most.
_SAMPLE_MULTIPLE = 6
_WORKSPACE_MULTIPLE = {"cuda": 3, "cpu": 20}


@dataclass(frozen=True, kw_only=True)
class KernelBenchRequest:
    """What to measure; None is what fits the device.

    Attributes:
        shapes: Names from `SHAPES`.
        lengths: Tokens; 1 is a decoding step.
        batches: Rows.
        dtype: As `torch` names it; "auto" is bfloat16 on a GPU and float32 on a CPU.
        repeats: How often everything that is timed is done.
        contenders: Names; all unless given.
        rivals: Where the files of others are, see `third_party_implementations.rivals`.
        steps: Whether to measure whole models, too.
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    dtype: str = "auto"
    repeats: int | None = None
    contenders: tuple[str, ...] | None = None
    rivals: Path | None = None
    steps: bool = True


def bench(request: KernelBenchRequest) -> dict[str, Any]:
    """Measures what is asked for.

    Args:
        request: What to measure.

    Returns:
        The setting; `cases`, each a problem with a row for each contender; `kept`, for each shape
        what contenders keep for backward in bfloat16; `steps`, see `model_steps.measure`.

    Raises:
        ValueError: A request that cannot be met.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contenders = [*builtin_implementations(), *third_party_implementations(request.rivals)]
    _validate_request(request, contenders)
    if request.contenders is not None:
        contenders = [c for c in contenders if c.name in request.contenders]
    auto = auto_implementation(device, _dtype(request, device))
    repeats = request.repeats or _REPEATS[device.type]
    problems = list(_problems(request, device))
    cases = [
        _measure_problem(problem, contenders, repeats)
        for problem in progress_bar(problems, desc="kernels", unit="case")
    ]
    kept = [_saved_for_backward(SHAPES[name], contenders, device) for name in request.shapes]
    steps: list[dict[str, Any]] = []
    if request.steps:
        dtype = _dtype(request, device)
        steps = model_steps.measure(request.shapes, device, dtype, min(repeats, _STEP_REPEATS))
    return {
        **asdict(request),
        "dtype": str(_dtype(request, device)).removeprefix("torch."),
        "repeats": repeats,
        "rivals": str(request.rivals or ""),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "interpreted": is_interpreted(),
        "date": provenance.now(),
        "versions": provenance.versions() | {name: version(name) for name in _PACKAGES},
        "titles": {COPY: "copy"} | {c.name: _title(c, auto) for c in contenders},
        "cases": cases,
        "kept": kept,
        "steps": steps,
    }


def _title(contender: Implementation, auto: str) -> str:
    return f"{contender.title} (auto)" if contender.name == auto else contender.title


def _measure_problem(
    problem: Problem, contenders: list[Implementation], repeats: int
) -> dict[str, Any]:
    """One problem's row for each contender, or why there are none."""
    case = {
        "shape": problem.shape.name,
        "batch": problem.batch,
        "length": problem.length,
        "layout": problem.layout,
        "bytes": problem.bytes,
    }
    count = 1 if is_interpreted() else samples_needed(problem, timing.cache_bytes(problem.device))
    needed = (_SAMPLE_MULTIPLE * count + _WORKSPACE_MULTIPLE[problem.device.type]) * problem.bytes
    if needed > (free := _available_memory(problem.device)):
        reason = f"it needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        return {**case, "not_measured": reason, "rows": []}
    try:
        return {**case, "rows": _measure_implementations(problem, contenders, count, repeats)}
    except RuntimeError as error:  # a GPU that a rival's kernel has broken stays so
        return {**case, "not_measured": describe_error(error), "rows": []}
    finally:
        _free_after_failure()


def _measure_implementations(
    problem: Problem, contenders: list[Implementation], count: int, repeats: int
) -> list[dict[str, Any]]:
    samples = [problem.sample(seed) for seed in range(count)]
    copy: dict[str, Any] = {"contender": COPY, "times": {}}
    rows: list[dict[str, Any]] = [copy]
    running: dict[str, TimedCalls] = {COPY: CopyBaseline(problem, count)}
    for contender in contenders:
        row: dict[str, Any] = {"contender": contender.name, "times": {}, "failed": {}}
        rows.append(row)
        try:
            worker = ImplementationRun(contender, problem, samples)
            row |= _errors_and_memory(worker, problem)
        except Exception as error:  # whatever it is, the others are measured
            row["not_measured"] = describe_error(error)
        else:
            running[contender.name] = worker
        if "not_measured" in row:  # and the error no longer holds what was on its way
            _free_after_failure()
    by_name = {row["contender"]: row for row in rows}
    for phase in _phases(problem):
        taken, failed = _time_phase(phase, running, repeats)
        for name, times in taken.items():
            by_name[name]["times"][phase] = _relative_to_copy(times, taken[COPY])
        for name, reason in failed.items():
            by_name[name]["failed"][phase] = reason
    copy["bytes_per_second"] = _bandwidth(problem, copy["times"])
    return rows


def _saved_for_backward(
    shape: Shape, contenders: list[Implementation], device: torch.device
) -> dict[str, Any]:
    """What each contender keeps for backward in the type that most models train in.

    At few tokens on a CPU: it grows with them, whatever the device.
    """
    problem = Problem(
        shape=shape,
        batch=1,
        length=_SAVED_LENGTH[device.type],
        layout=VIEWS,
        dtype=torch.bfloat16,
        device=device,
    )
    rows: list[dict[str, Any]] = []
    for contender in contenders:
        try:
            found: dict[str, Any] = ImplementationRun(
                contender, problem, [problem.sample(0)]
            ).saved_bytes()
        except Exception as error:  # whatever it is, the others are measured
            found = {"not_measured": describe_error(error)}
        rows.append({"contender": contender.name, **found})
    return {"shape": shape.name, "length": problem.length, "bytes": problem.bytes, "rows": rows}


def _errors_and_memory(worker: ImplementationRun, problem: Problem) -> dict[str, Any]:
    """Errors, and memory where a backward is part of it."""
    found = worker.relative_errors()
    allowed = TOLERANCES[problem.dtype]
    right = all(error <= allowed for error in found.values())  # which NaN is not
    row: dict[str, Any] = {"errors": found, "wrong": not right}
    if problem.length > 1:
        row["peak"] = {
            phase: timing.peak_memory(worker.prepare(phase, 0)) for phase in (FORWARD, BOTH)
        }
        row["saved"] = worker.saved_bytes()
    return row


def _time_phase(
    phase: str, running: dict[str, TimedCalls], repeats: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Seconds of each contender's calls, a list a repeat; and why some have none."""
    clocks: dict[str, Callable[[], list[float]]] = {}
    failed: dict[str, str] = {}
    for name, runner in running.items():
        try:
            clock = runner.clock(phase)
            clock()  # what is set up at the first call is no part of the second
            clocks[name] = clock
        except Exception as error:
            failed[name] = describe_error(error)
        if name in failed:
            _free_after_failure()
    if COPY in failed:
        raise RuntimeError(f"the copy: {failed[COPY]}")
    taken: dict[str, list[list[float]]] = {name: [] for name in clocks}
    for repeat in range(repeats):
        for name in list(clocks)[:: -1 if repeat % 2 else 1]:
            taken[name].append(clocks[name]())
    return taken, failed


def _relative_to_copy(taken: list[list[float]], copy: list[list[float]]) -> dict[str, float]:
    """Milliseconds, and the copy's time as per cent of them, with the extremes of the repeats."""
    found = compare_times(taken, copy)
    return {
        "ms": found["ms"],
        "percent": 100 / found["ratio"],
        "min": 100 / found["max"],
        "max": 100 / found["min"],
    }


def _phases(problem: Problem) -> tuple[str, ...]:
    if problem.length > 1:
        return TRAINING
    return (GRAPH, WALL) if problem.device.type == "cuda" else (WALL,)


def _problems(request: KernelBenchRequest, device: torch.device) -> Iterator[Problem]:
    """Every size as views; the other layouts at one of them."""
    lengths = sorted(request.lengths or _LENGTHS[device.type])
    batches = sorted(request.batches or _BATCHES[device.type])
    middle = [n for n in lengths if 1 < n <= _LAYOUTS_MAX_LENGTH][-1:]
    for name in request.shapes:
        sizes = [(batch, length, VIEWS) for batch in batches for length in lengths]
        sizes += [(batches[0], length, layout) for length in middle for layout in (PACKED, BHSD)]
        for batch, length, layout in sizes:
            yield Problem(
                shape=SHAPES[name],
                batch=batch,
                length=length,
                layout=layout,
                dtype=_dtype(request, device),
                device=device,
            )


def _dtype(request: KernelBenchRequest, device: torch.device) -> torch.dtype:
    name = _DTYPES[device.type] if request.dtype == "auto" else request.dtype
    return getattr(torch, name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.processor() or platform.machine()}"


def _available_memory(device: torch.device) -> int:
    """Bytes of memory to be had."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _bandwidth(problem: Problem, times: dict[str, dict[str, float]]) -> float:
    """Bytes that the copy reads and writes in a second."""
    once = times[FORWARD if problem.length > 1 else WALL]
    return 2 * problem.bytes / (once["ms"] / 1e3)


def _free_after_failure() -> None:
    """Gives back what a failure may hold, so that the next one has room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _validate_request(request: KernelBenchRequest, contenders: list[Implementation]) -> None:
    """Refuses what cannot be met."""
    known = {
        "shapes": (request.shapes, list(SHAPES)),
        "contenders": (request.contenders or (), [c.name for c in contenders]),
        "dtype": ((request.dtype,), ["auto", *(str(d).removeprefix("torch.") for d in TOLERANCES)]),
    }
    for name, (given, names) in known.items():
        if unknown := [x for x in given if x not in names]:
            raise ValueError(f"{name} must be of {', '.join(names)}; got {', '.join(unknown)}")
    for name, numbers in (("lengths", request.lengths), ("batches", request.batches)):
        if numbers is not None and (not numbers or min(numbers) < 1):
            raise ValueError(f"{name} must be whole numbers of at least 1, got {numbers}")
    if request.repeats is not None and request.repeats < 1:
        raise ValueError(f"repeats must be a whole number of at least 1, got {request.repeats}")
    if request.rivals is not None and not request.rivals.is_dir():
        raise ValueError(f"rivals must be a folder, got {request.rivals}")
