"""The kernel benchmark: every implementation on every problem, interleaved.

Times are relative to a copy, measured milliseconds apart: nothing that moves as many bytes is
faster than that.
"""

from __future__ import annotations

import json
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

from rope_patch.benchmarks.kernels import model_steps
from rope_patch.benchmarks.kernels.implementations import (
    Implementation,
    auto_implementation,
    builtin_implementations,
    describe_error,
)
from rope_patch.benchmarks.kernels.problems import (
    BHSD,
    PACKED,
    SHAPES,
    TOLERANCES,
    VIEWS,
    Problem,
    Shape,
    samples_needed,
)
from rope_patch.benchmarks.kernels.third_party import third_party_implementations
from rope_patch.benchmarks.kernels.timing import (
    BOTH,
    FORWARD,
    GRAPH,
    TRAINING,
    WALL,
    Clock,
    CopyBaseline,
    ImplementationRun,
    TimedCalls,
    cache_bytes,
    copied_bytes,
    l2_bytes,
    moved_bytes,
    peak_memory,
)
from rope_patch.evaluation.measures.speed import compare_times
from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason
from rope_patch.utils import provenance
from rope_patch.utils.atomic_files import add_write_advice, atomic_write
from rope_patch.utils.checksums import json_safe
from rope_patch.utils.errors import one_line
from rope_patch.utils.installation import version
from rope_patch.utils.processes import free_memory
from rope_patch.utils.terminal import progress_bar

logger = logging.getLogger("rope_patch")

FILE = "bench.json"
COPY, COPY_KERNEL = "copy", "copy-kernel"
COPIES = (COPY, COPY_KERNEL)
_COPY_TITLES = {COPY: "copy", COPY_KERNEL: "copy, Triton kernel"}
_LISTS = ("cases", "kept", "steps", "launches")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # how `json_safe` writes numbers that are not finite

_LENGTHS = {"cuda": (1, 1024, 8192, 131072), "cpu": (1, 128, 1024)}
_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
_REPEATS = {"cuda": 10, "cpu": 5}
_BATCHES = (1,)
_LAYOUTS_MAX_LENGTH = 8192  # tokens; the layouts are compared at the longest length up to there

# Contenders that a GPU measures only if they are named: what no GPU rotates by, and what tunes
# itself for longer than all others are measured.
_LEFT_OUT = {"cuda": ("ours-tables", "ours-reference", "fla"), "cpu": ()}

# Sizes that a run names where the default leaves them out.
ALL_LENGTHS = (1, 128, 1024, 8192, 32768, 131072)
_ALL_BATCHES = (1, 4)

# A CPU needs few tokens, because what is saved is proportional to them on any device.
_SAVED_LENGTH = {"cuda": 8192, "cpu": 64}  # tokens where what is saved for backward is measured
_PACKAGES = ("triton", "liger-kernel", "fla-core")
_STEP_REPEATS = 5  # repeats of a model's step at most, since each is long

# Memory of a problem, as multiples of N: per sample with its copies, and per implementation. On a
# GPU a shortage is an error to report; on a CPU the process would die, so assume the largest need.
_SAMPLE_MULTIPLE = 8
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
        contenders: Names of implementations; None means all, without slow ones on a GPU.
        rivals: Folder with the files of third-party implementations.
        steps: Whether to measure whole models, too, and to count their launches.
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    dtype: str = "auto"
    repeats: int | None = None
    contenders: tuple[str, ...] | None = None
    rivals: Path | None = None
    steps: bool = True


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """A request with everything chosen; the attributes are `KernelBenchRequest`'s."""

    shapes: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: str
    repeats: int
    contenders: tuple[str, ...]
    rivals: Path | None
    steps: bool

    def problems(self, shape: str, device: torch.device) -> Iterator[Problem]:
        """Yield every size of a shape in the default layout, and the other layouts at one size."""
        middle = [n for n in self.lengths if 1 < n <= _LAYOUTS_MAX_LENGTH][-1:]
        sizes = [(batch, length, VIEWS) for batch in self.batches for length in self.lengths]
        sizes += [
            (self.batches[0], length, layout) for length in middle for layout in (PACKED, BHSD)
        ]
        for batch, length, layout in sizes:
            yield Problem(
                shape=SHAPES[shape],
                batch=batch,
                length=length,
                layout=layout,
                dtype=self.torch_dtype,
                device=device,
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of queries and keys."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class _Part:
    """A part of the run: its name, its list in the results, and its measurement."""

    key: str
    kind: str
    measure: Callable[[], list[dict[str, Any]]]


def bench(
    request: KernelBenchRequest,
    folder: Path | None = None,
    results: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        request: What to measure.
        folder: Folder of `bench.json`, which is written after each part, so that a run that is
            ended keeps what it measured; None writes nothing.
        results: An empty dict to fill part by part, for a caller that may be interrupted.

    Returns:
        The settings; `cases`, each a problem with a row per implementation; `kept`, per shape what
        implementations save for backward in bfloat16; `steps` and `launches`, see `model_steps`;
        `seconds` that each part took; `missing`, the parts that are not measured yet.

    Raises:
        ValueError: The request cannot be met.
    """
    device = current_device()
    known = all_implementations(request)
    settings = choose_settings(request, device.type, known)
    contenders = [c for c in known if c.name in settings.contenders]
    parts = list(_parts(settings, contenders, device))
    results = {} if results is None else results
    results |= _header(settings, contenders, device) | {kind: [] for kind in _LISTS}
    results |= {"seconds": {}, "missing": [part.key for part in parts]}
    if device.type == "cuda" and (options := left_out(request)):
        logger.info("Left out unless asked for: %s.", ", ".join(options))
    with progress_bar(total=len(parts), desc="kernels", unit="part") as bar:
        for part in parts:
            bar.set_postfix_str(part.key, refresh=False)
            start = time.perf_counter()
            results[part.kind] += part.measure()
            results["seconds"][part.key] = time.perf_counter() - start
            results["missing"].remove(part.key)
            if folder is not None:
                with add_write_advice("REMEDY, and run the same command again"):
                    atomic_write(folder / FILE, as_json(results))
            bar.update()
    return results


def current_device() -> torch.device:
    """Return the device that is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def all_implementations(request: KernelBenchRequest) -> list[Implementation]:
    """Return all implementations."""
    return [*builtin_implementations(), *third_party_implementations(request.rivals)]


def choose_settings(
    request: KernelBenchRequest, device_type: str, contenders: list[Implementation]
) -> BenchSettings:
    """Return a request with everything chosen.

    Args:
        request: The request.
        device_type: "cuda" or "cpu".
        contenders: All implementations.

    Raises:
        ValueError: The request cannot be met.
    """
    _validate(request, contenders)
    names = request.contenders
    if names is None:
        names = tuple(c.name for c in contenders if c.name not in _LEFT_OUT[device_type])
    return BenchSettings(
        shapes=tuple(dict.fromkeys(request.shapes)),
        lengths=tuple(sorted(set(request.lengths or _LENGTHS[device_type]))),
        batches=tuple(sorted(set(request.batches or _BATCHES))),
        dtype=_DTYPES[device_type] if request.dtype == "auto" else request.dtype,
        repeats=request.repeats or _REPEATS[device_type],
        contenders=tuple(c.name for c in contenders if c.name in names),
        rivals=request.rivals,
        steps=request.steps,
    )


def _validate(request: KernelBenchRequest, contenders: list[Implementation]) -> None:
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


def left_out(request: KernelBenchRequest) -> list[str]:
    """Return what the defaults leave out on a GPU, as the options that add it."""
    options = []
    if request.lengths is None:
        options.append(f"--lengths {','.join(map(str, ALL_LENGTHS))}")
    if request.batches is None:
        options.append(f"--batch {','.join(map(str, _ALL_BATCHES))}")
    if request.contenders is None:
        options.append(f"--contenders {','.join(_LEFT_OUT['cuda'])}")
    return options


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
                    partial(model_steps.measure_steps, name, device, settings.torch_dtype, repeats),
                ),
                ("launches", partial(model_steps.measure_launches, SHAPES[name], device)),
            ):
                yield _Part(part_key(kind, {"model": name}), kind, measure_model)


def _as_list(measure: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    return [measure()]


def _header(
    settings: BenchSettings, contenders: list[Implementation], device: torch.device
) -> dict[str, Any]:
    """Return what the results say beside measurements."""
    auto = auto_implementation(device, settings.torch_dtype)
    return {
        **asdict(settings),
        "rivals": str(settings.rivals or ""),
        "device": _device_name(device),
        "l2_bytes": l2_bytes(device),
        "threads": torch.get_num_threads(),
        "interpreted": is_interpreted(),
        "versions": provenance.versions() | {name: version(name) for name in _PACKAGES},
        "date": provenance.now(),
        "titles": _COPY_TITLES | {c.name: _title(c, auto) for c in contenders},
    }


def _title(contender: Implementation, auto: str) -> str:
    return f"{contender.title} (auto)" if contender.name == auto else contender.title


def _measure_problem(
    problem: Problem, contenders: list[Implementation], repeats: int
) -> dict[str, Any]:
    """Return a problem's row for each implementation, or the reason why there are none."""
    count = 1 if is_interpreted() else samples_needed(problem, cache_bytes(problem.device))
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
        free_memory()


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
            free_memory()
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
    """Return what each implementation saves for backward in bfloat16, the usual training type."""
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
        row["peak"] = {phase: peak_memory(worker.prepare(phase, 0)) for phase in (FORWARD, BOTH)}
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
            free_memory()
    if COPY in failed:
        raise RuntimeError(f"the copy: {failed[COPY]}")
    seconds: dict[str, list[list[float]]] = {name: [] for name in clocks}
    for repeat in range(repeats):
        for name in list(clocks)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(clocks[name]())
    waiting = {name for name, clock in clocks.items() if clock.includes_launches}
    return _TimedPhase(seconds, failed, waiting)


def _relative_to_copy(
    seconds: list[list[float]], copy_seconds: list[list[float]], bytes_over_copy: float
) -> dict[str, float]:
    """Return milliseconds, and per cent of the copy's bandwidth with the repeats' extremes."""
    # Seconds are those of each call, a list per repeat. A call must move `bytes_over_copy` times
    # the bytes that the copy moves.
    ratios = compare_times(seconds, copy_seconds)
    return {
        "ms": ratios["ms"],
        "percent": 100 * bytes_over_copy / ratios["ratio"],
        "min": 100 * bytes_over_copy / ratios["max"],
        "max": 100 * bytes_over_copy / ratios["min"],
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


def case_of(problem: Problem) -> dict[str, Any]:
    """Return the entries of a case's results that say which problem it is."""
    return {
        "shape": problem.shape.name,
        "batch": problem.batch,
        "length": problem.length,
        "layout": problem.layout,
        "bytes": problem.bytes,
    }


def part_key(kind: str, row: dict[str, Any]) -> str:
    """Return the name of a part of the run from its result, or from what determines it.

    Args:
        kind: "cases", "kept", "steps" or "launches".
        row: A case; or a dict with the shape's name as "shape" or "model".
    """
    if kind == "cases":
        tokens = "1 token" if row["length"] == 1 else f"{row['length']:,} tokens"
        return f"{row['shape']}, {tokens} × {row['batch']}, {row['layout']}"
    return f"{row.get('shape', row.get('model'))}, {kind}"


def as_json(results: dict[str, Any]) -> str:
    """Return the results as strict JSON."""
    return json.dumps(json_safe(results), indent=1, ensure_ascii=False) + "\n"


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results in a folder, of a whole run or of one that was ended.

    Raises:
        ValueError: There are none of this version, or the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"expected results in {path}, got none: run the bench with --out")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"it is a {type(stored).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: expected the results of a run, got {one_line(str(error))}; run "
            "the bench again, or give another --out"
        ) from error
    if "missing" not in stored:
        raise ValueError(
            f"{path} was written by another version: expected results of this one; run the bench "
            "again"
        )
    return _revive(stored)


def _revive(value: Any) -> Any:
    """Return data of strict JSON with the floats that JSON lacks."""
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return float(value) if value in _NOT_FINITE and isinstance(value, str) else value
