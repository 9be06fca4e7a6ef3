"""The kernel benchmark: every implementation on every problem, interleaved.

Times are relative to a copy of as many bytes, measured milliseconds apart: nothing that reads and
writes queries and keys is faster than that.
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

# Memory of a problem, as multiples of N: per sample with its copies, and per implementation. On a
# GPU a shortage is an error to report; on a CPU the process would die, so assume the largest need.
_SAMPLE_MULTIPLE = 6
_WORKSPACE_MULTIPLE = {"cuda": 3, "cpu": 20}


@dataclass(frozen=True, kw_only=True)
class KernelBenchRequest:
    """Request of a benchmark; None chooses by device.

    Attributes:
        shapes: Names from `SHAPES`.
        lengths: Lengths in tokens; 1 is a decode step.
        batches: Batch sizes.
        dtype: torch's name of a dtype; "auto" is bfloat16 on a GPU and float32 on a CPU.
        repeats: Repeats of every timing.
        contenders: Names of implementations; None means all.
        third_party_implementations: Folder with the files of third-party implementations.
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
    """Run the benchmark.

    Args:
        request: What to measure.

    Returns:
        The settings; `cases`, each a problem with a row per implementation; `kept`, per shape what
        implementations save for backward in bfloat16; `steps`, see `model_steps.measure`.

    Raises:
        ValueError: The request cannot be met.
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
    saved = [_saved_for_backward(SHAPES[name], contenders, device) for name in request.shapes]
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
        "kept": saved,
        "steps": steps,
    }


def _title(contender: Implementation, auto: str) -> str:
    return f"{contender.title} (auto)" if contender.name == auto else contender.title


def _measure_problem(
    problem: Problem, contenders: list[Implementation], repeats: int
) -> dict[str, Any]:
    """Return a problem's row for each implementation, or the reason why there are none."""
    case = {
        "shape": problem.shape.name,
        "batch": problem.batch,
        "length": problem.length,
        "layout": problem.layout,
        "bytes": problem.bytes,
    }
    count = 1 if is_interpreted() else samples_needed(problem, timing.cache_bytes(problem.device))
    needed_bytes = (
        _SAMPLE_MULTIPLE * count + _WORKSPACE_MULTIPLE[problem.device.type]
    ) * problem.bytes
    if needed_bytes > (available_bytes := _available_memory(problem.device)):
        reason = (
            f"it needs {needed_bytes / 1e9:.1f} GB, and {available_bytes / 1e9:.1f} GB are free"
        )
        return {**case, "not_measured": reason, "rows": []}
    try:
        return {**case, "rows": _measure_implementations(problem, contenders, count, repeats)}
    except RuntimeError as error:  # a GPU stays broken after a bad kernel
        return {**case, "not_measured": describe_error(error), "rows": []}
    finally:
        _free_after_failure()


def _measure_implementations(
    problem: Problem, contenders: list[Implementation], count: int, repeats: int
) -> list[dict[str, Any]]:
    samples = [problem.sample(seed) for seed in range(count)]
    copy: dict[str, Any] = {"contender": COPY, "times": {}}
    rows: list[dict[str, Any]] = [copy]
    implementations: dict[str, TimedCalls] = {COPY: CopyBaseline(problem, count)}
    for contender in contenders:
        row: dict[str, Any] = {"contender": contender.name, "times": {}, "failed": {}}
        rows.append(row)
        try:
            worker = ImplementationRun(contender, problem, samples)
            row |= _errors_and_memory(worker, problem)
        except Exception as error:  # measure the others whatever it is
            row["not_measured"] = describe_error(error)
        else:
            implementations[contender.name] = worker
        if "not_measured" in row:  # outside `except`, so that the error holds no tensors
            _free_after_failure()
    by_name = {row["contender"]: row for row in rows}
    for phase in _phases(problem):
        seconds, failed = _time_phase(phase, implementations, repeats)
        for name, times in seconds.items():
            by_name[name]["times"][phase] = _relative_to_copy(times, seconds[COPY])
        for name, reason in failed.items():
            by_name[name]["failed"][phase] = reason
    copy["bytes_per_second"] = _bandwidth(problem, copy["times"])
    return rows


def _saved_for_backward(
    shape: Shape, contenders: list[Implementation], device: torch.device
) -> dict[str, Any]:
    """Return what each implementation saves for backward in bfloat16, the usual training type.

    On a CPU few tokens suffice, because the size is proportional to them on any device.
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
            row: dict[str, Any] = ImplementationRun(
                contender, problem, [problem.sample(0)]
            ).saved_bytes()
        except Exception as error:  # measure the others whatever it is
            row = {"not_measured": describe_error(error)}
        rows.append({"contender": contender.name, **row})
    return {"shape": shape.name, "length": problem.length, "bytes": problem.bytes, "rows": rows}


def _errors_and_memory(worker: ImplementationRun, problem: Problem) -> dict[str, Any]:
    """Return the errors, and the memory if the problem has a backward pass."""
    errors = worker.relative_errors()
    allowed = TOLERANCES[problem.dtype]
    is_correct = all(error <= allowed for error in errors.values())  # False for NaN
    row: dict[str, Any] = {"errors": errors, "wrong": not is_correct}
    if problem.length > 1:
        row["peak"] = {
            phase: timing.peak_memory(worker.prepare(phase, 0)) for phase in (FORWARD, BOTH)
        }
        row["saved"] = worker.saved_bytes()
    return row


def _time_phase(
    phase: str, implementations: dict[str, TimedCalls], repeats: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Return the seconds of each implementation's calls, a list per repeat, and the failures."""
    clocks: dict[str, Callable[[], list[float]]] = {}
    failed: dict[str, str] = {}
    for name, runner in implementations.items():
        try:
            clock = runner.clock(phase)
            clock()  # warm up: the first call compiles and sets up
            clocks[name] = clock
        except Exception as error:
            failed[name] = describe_error(error)
        if name in failed:
            _free_after_failure()
    if COPY in failed:
        raise RuntimeError(f"the copy: {failed[COPY]}")
    seconds: dict[str, list[list[float]]] = {name: [] for name in clocks}
    for repeat in range(repeats):
        for name in list(clocks)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(clocks[name]())
    return seconds, failed


def _relative_to_copy(seconds: list[list[float]], copy: list[list[float]]) -> dict[str, float]:
    """Return milliseconds, and the copy's time in percent of them with the repeats' extremes."""
    ratios = compare_times(seconds, copy)
    return {
        "ms": ratios["ms"],
        "percent": 100 / ratios["ratio"],
        "min": 100 / ratios["max"],
        "max": 100 / ratios["min"],
    }


def _phases(problem: Problem) -> tuple[str, ...]:
    if problem.length > 1:
        return TRAINING
    return (GRAPH, WALL) if problem.device.type == "cuda" else (WALL,)


def _problems(request: KernelBenchRequest, device: torch.device) -> Iterator[Problem]:
    """Yield every size in the default layout, and the other layouts at one size."""
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
    """Return the bytes of available memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _bandwidth(problem: Problem, times: dict[str, dict[str, float]]) -> float:
    """Return the bytes that the copy reads and writes per second."""
    copy_time = times[FORWARD if problem.length > 1 else WALL]
    return 2 * problem.bytes / (copy_time["ms"] / 1e3)


def _free_after_failure() -> None:
    """Free the memory that a failure may hold, for the next measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _validate_request(request: KernelBenchRequest, contenders: list[Implementation]) -> None:
    """Raise ValueError if the request cannot be met."""
    choices = {
        "shapes": (request.shapes, list(SHAPES)),
        "contenders": (request.contenders or (), [c.name for c in contenders]),
        "dtype": ((request.dtype,), ["auto", *(str(d).removeprefix("torch.") for d in TOLERANCES)]),
    }
    for name, (values, names) in choices.items():
        if unknown := [x for x in values if x not in names]:
            raise ValueError(f"{name} must be of {', '.join(names)}; got {', '.join(unknown)}")
    for name, numbers in (("lengths", request.lengths), ("batches", request.batches)):
        if numbers is not None and (not numbers or min(numbers) < 1):
            raise ValueError(f"{name} must be whole numbers of at least 1, got {numbers}")
    if request.repeats is not None and request.repeats < 1:
        raise ValueError(f"repeats must be a whole number of at least 1, got {request.repeats}")
    if request.rivals is not None and not request.rivals.is_dir():
        raise ValueError(f"rivals must be a folder, got {request.rivals}")
