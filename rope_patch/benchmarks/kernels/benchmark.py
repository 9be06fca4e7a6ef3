"""The kernel benchmark: every implementation on every problem, interleaved.

Times are relative to a copy, measured milliseconds apart: nothing that moves as many bytes is
faster than that.
"""

from __future__ import annotations

import gc
import logging
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from rope_patch.benchmarks.kernels import estimate, launch_count, model_steps, timing
from rope_patch.benchmarks.kernels.ground_truth import TOLERANCES
from rope_patch.benchmarks.kernels.implementations import (
    Implementation,
    auto_implementation,
    builtin_implementations,
    describe_error,
)
from rope_patch.benchmarks.kernels.request import (
    BenchSettings,
    KernelBenchRequest,
    case_of,
    choose_settings,
    left_out,
)
from rope_patch.benchmarks.kernels.run_state import RunState, part_key
from rope_patch.benchmarks.kernels.shapes import SHAPES, VIEWS, Problem, Shape, samples_needed
from rope_patch.benchmarks.kernels.third_party import (
    digest_files,
    third_party_implementations,
)
from rope_patch.benchmarks.kernels.workers import (
    BOTH,
    FORWARD,
    GRAPH,
    TRAINING,
    WALL,
    Clock,
    CopyBaseline,
    ImplementationRun,
    TimedCalls,
    copied_bytes,
    moved_bytes,
)
from rope_patch.evaluation.measures.timed_method import compare_times
from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason
from rope_patch.utils import checksums, provenance
from rope_patch.utils.progress import progress_bar
from rope_patch.utils.versions import version

logger = logging.getLogger("rope_patch")

COPY, COPY_KERNEL = "copy", "copy-kernel"
COPIES = (COPY, COPY_KERNEL)
_COPY_TITLES = {COPY: "copy", COPY_KERNEL: "copy, Triton kernel"}

_SAVED_LENGTH = {"cuda": 8192, "cpu": 64}  # tokens
_PACKAGES = ("triton", "liger-kernel", "fla-core")
_STEP_REPEATS = 5  # at most: each is of many tokens

# Memory of a problem, as multiples of N: per sample with its copies, and per implementation. On a
# GPU a shortage is an error to report; on a CPU the process would die, so assume the largest need.
_SAMPLE_MULTIPLE = 8
_WORKSPACE_MULTIPLE = {"cuda": 3, "cpu": 20}


@dataclass(frozen=True)
class _Part:
    """A part of the run: its name, its list in the results, and its measurement."""

    key: str
    kind: str
    measure: Callable[[], list[dict[str, Any]]]


def bench(request: KernelBenchRequest, folder: Path | None = None) -> dict[str, Any]:
    """Run the benchmark, or continue a run that was killed.

    Args:
        request: What to measure.
        folder: Folder of `bench.json`, written after each part; None writes nothing.

    Returns:
        The settings; `cases`, each a problem with a row per implementation; `kept`, per shape what
        implementations save for backward in bfloat16; `steps`, see `model_steps.measure`;
        `launches`, see `launch_count.count`; `seconds` and `missing`, see `RunState`.

    Raises:
        ValueError: The request cannot be met, or the folder has results of another one.
    """
    device = current_device()
    known = all_implementations(request)
    settings = choose_settings(request, device.type, known)
    contenders = [c for c in known if c.name in settings.contenders]
    parts = list(_parts(settings, contenders, device))
    state = RunState(
        folder, _header(settings, contenders, device), {part.key: part.kind for part in parts}
    )
    if device.type == "cuda":
        seconds = estimate.part_seconds(settings)
        missing = {key: seconds[key] for key in seconds if not state.is_done(key)}
        logger.info("%s", estimate.describe(missing, left_out(request)))
    with progress_bar(total=len(parts), desc="kernels", unit="part") as bar:
        for part in parts:
            bar.set_postfix_str(part.key, refresh=False)
            if not state.is_done(part.key):
                start = time.perf_counter()
                rows = part.measure()
                state.add(part.key, rows, time.perf_counter() - start)
            bar.update()
    return state.results()


def current_device() -> torch.device:
    """Return the device that is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def all_implementations(request: KernelBenchRequest) -> list[Implementation]:
    """Return all implementations."""
    return [*builtin_implementations(), *third_party_implementations(request.rivals)]


def _parts(
    settings: BenchSettings, contenders: list[Implementation], device: torch.device
) -> Iterator[_Part]:
    """Yield all parts: by shape, because that is what torch.compile compiles for, then models."""
    for name in settings.shapes:
        for problem in settings.problems(name, device):
            measure = partial(_measure_problem, problem, contenders, settings.repeats)
            yield _Part(part_key("cases", case_of(problem)), "cases", partial(_as_list, measure))
        yield _Part(
            part_key("kept", {"shape": name}),
            "kept",
            partial(_as_list, partial(_saved_for_backward, SHAPES[name], contenders, device)),
        )
    if settings.steps:
        repeats = min(settings.repeats, _STEP_REPEATS)
        for name in settings.shapes:
            for kind, measure_model in (
                (
                    "steps",
                    partial(model_steps.measure, name, device, settings.torch_dtype, repeats),
                ),
                ("launches", partial(launch_count.measure, SHAPES[name], device)),
            ):
                yield _Part(part_key(kind, {"model": name}), kind, measure_model)


def _as_list(measure: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    return [measure()]


def _header(
    settings: BenchSettings, contenders: list[Implementation], device: torch.device
) -> dict[str, Any]:
    """Return what the results say beside measurements."""
    auto = auto_implementation(device, settings.torch_dtype)
    header = {
        **asdict(settings),
        "rivals": str(settings.rivals or ""),
        "device": _device_name(device),
        "l2_bytes": timing.l2_bytes(device),
        "threads": torch.get_num_threads(),
        "interpreted": is_interpreted(),
        "versions": provenance.versions() | {name: version(name) for name in _PACKAGES},
    }
    identity = {name: value for name, value in header.items() if name != "rivals"} | {
        "files of rivals": digest_files(settings.rivals),
        "source": _source_digest(),
    }
    return {
        **header,
        "identity": identity,
        "date": provenance.now(),
        "titles": _COPY_TITLES | {c.name: _title(c, auto) for c in contenders},
    }


def _source_digest() -> str:
    """Return a digest of the kernels' and the benchmark's code."""
    package = Path(__file__).parents[2]
    folders = (package / "ops", Path(__file__).parent)
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return checksums.digest(b"".join(path.read_bytes() for path in files), 16)


def _title(contender: Implementation, auto: str) -> str:
    return f"{contender.title} (auto)" if contender.name == auto else contender.title


def _measure_problem(
    problem: Problem, contenders: list[Implementation], repeats: int
) -> dict[str, Any]:
    """Return a problem's row for each implementation, or the reason why there are none."""
    count = 1 if is_interpreted() else samples_needed(problem, timing.cache_bytes(problem.device))
    # What forward reads and writes until it comes to the first sample again.
    case = case_of(problem) | {"working_set": count * moved_bytes(problem, FORWARD)}
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
    copies = _copies(problem, count)
    rows: list[dict[str, Any]] = [{"contender": name, "times": {}, "failed": {}} for name in copies]
    implementations: dict[str, TimedCalls] = dict(copies)
    for contender in contenders:
        row: dict[str, Any] = {"contender": contender.name, "times": {}, "failed": {}}
        rows.append(row)
        start = time.perf_counter()
        try:
            worker = ImplementationRun(contender, problem, samples)
            row |= _errors_and_memory(worker, problem)
            row["setup_seconds"] = time.perf_counter() - start
        except Exception as error:  # measure the others whatever it is
            row["not_measured"] = describe_error(error)
        else:
            implementations[contender.name] = worker
        if "not_measured" in row:  # outside `except`, so that the error holds no tensors
            _free_after_failure()
    by_name = {row["contender"]: row for row in rows}
    for phase in _phases(problem):
        timed = _time_phase(phase, implementations, repeats)
        baseline = min(
            (name for name in COPIES if name in timed.seconds),
            key=lambda name: median(chain.from_iterable(timed.seconds[name])),
        )
        for name, seconds in timed.seconds.items():
            moved = copied_bytes if name in COPIES else moved_bytes
            share = moved(problem, phase) / copied_bytes(problem, phase)
            times = _relative_to_copy(seconds, timed.seconds[baseline], share)
            by_name[name]["times"][phase] = times | {"with_launches": name in timed.with_launches}
        for name, reason in timed.failed.items():
            by_name[name]["failed"][phase] = reason
    rows[0]["bytes_per_second"] = _bandwidth(problem, rows[: len(copies)])
    return rows


def _copies(problem: Problem, count: int) -> dict[str, CopyBaseline]:
    """Return the copies that run here."""
    copies = {COPY: CopyBaseline(problem, count)}
    if triton_unavailable_reason() is None and (problem.device.type == "cuda" or is_interpreted()):
        from rope_patch.benchmarks.kernels import copy_kernel

        copies[COPY_KERNEL] = CopyBaseline(problem, count, copy_kernel.copy)
    for copy in copies.values():
        copy.require_exact()
    return copies


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


@dataclass(frozen=True)
class _TimedPhase:
    """Seconds of each implementation's calls, a list per repeat; failures; who waited."""

    seconds: dict[str, list[list[float]]]
    failed: dict[str, str]
    with_launches: set[str]


def _time_phase(phase: str, implementations: dict[str, TimedCalls], repeats: int) -> _TimedPhase:
    clocks: dict[str, Clock] = {}
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
    waiting = {name for name, clock in clocks.items() if clock.includes_launches}
    return _TimedPhase(seconds, failed, waiting)


def _relative_to_copy(
    seconds: list[list[float]], copy: list[list[float]], share: float
) -> dict[str, float]:
    """Return milliseconds, and per cent of the copy's bandwidth with the repeats' extremes.

    Args:
        seconds: Seconds of each call, a list per repeat.
        copy: The copy's.
        share: Bytes that a call must move, as a multiple of those that the copy moves.
    """
    ratios = compare_times(seconds, copy)
    return {
        "ms": ratios["ms"],
        "percent": 100 * share / ratios["ratio"],
        "min": 100 * share / ratios["max"],
        "max": 100 * share / ratios["min"],
    }


def _phases(problem: Problem) -> tuple[str, ...]:
    if problem.length > 1:
        return TRAINING
    return (GRAPH, WALL) if problem.device.type == "cuda" else (WALL,)


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


def _bandwidth(problem: Problem, copies: list[dict[str, Any]]) -> float:
    """Return the bytes that the fastest copy reads and writes per second."""
    phase = FORWARD if problem.length > 1 else WALL
    ms = min(copy["times"][phase]["ms"] for copy in copies if phase in copy["times"])
    return 2 * problem.bytes / (ms / 1e3)


def _free_after_failure() -> None:
    """Free the memory that a failure may hold, for the next measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
