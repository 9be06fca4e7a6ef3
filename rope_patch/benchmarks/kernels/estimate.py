"""How long a run takes on a GPU such as an H200, by assumptions that are stated.

They are generous: runs estimated at 77 to 172 s took 22 to 60 s on an H200 where all kernels had
been compiled before. A run records what it took, as `seconds` of its parts and `setup_seconds` of
its rows.
"""

from __future__ import annotations

import torch

from rope_patch.benchmarks.kernels.request import BenchSettings, case_of
from rope_patch.benchmarks.kernels.run_state import part_key
from rope_patch.benchmarks.kernels.shapes import PACKED, SHAPES, Problem, samples_needed
from rope_patch.benchmarks.kernels.workers import TRAINING

LIMIT = 540.0  # seconds that a default run, or a command of the plan, stays below

# Seconds.
_START = 20.0  # Python, torch, transformers, the GPU's context
_GRAPH = 20.0  # a graph of torch.compile, forward and backward; 15 to 20 are usual
_TRITON = 2.0  # Triton's compilation for a contender, a shape and a class of lengths
_TUNING = 20.0  # FLA tries configurations for each shape
_CHECK = 0.5  # errors, memory, and warming up of a contender in a case
_CALL = 2e-3  # the sleep before a call and the CPU's work beside it
_CAPTURE = 0.5  # capturing a CUDA graph of single tokens
_MODEL = 15.0  # building and measuring steps of a model with two layers
_LAUNCHES = 15.0  # building a narrow model with all layers, and counting

_BYTES_PER_SECOND = 4e12
_L2_BYTES = 60 * 2**20
_UNCOUNTED_PASSES = 3  # over all samples, before the repeats: warming up, and one repetition

# GPU time of a call as a multiple of a copy's; a call is prepared in about as much.
_COPIES = {"hf": 15, "ours-reference": 40, "ours-tables": 15}
_OTHER_COPIES = 3
_FLOAT64_COPIES = 100  # of comparing with float64

_COPY_ROWS = 2
_NORM_ONLY = ("ours-output", "ours-frozen")
_ROTATION_ONLY = ("flash-attn", "fla")

ASSUMPTIONS = (
    f"{_GRAPH:.0f} s for each graph of torch.compile, {_TRITON:.0f} s for Triton's compilation of "
    f"each contender, shape and class of lengths, {_CHECK:g} s to check a contender in a case, "
    f"{1e3 * _CALL:.0f} ms for each timed call beside its own time, {_BYTES_PER_SECOND / 1e12:.0f} "
    f"TB/s, {_MODEL:.0f} s for a model's steps, {_START:.0f} s to start"
)


def describe(seconds: dict[str, float], options_left_out: list[str]) -> str:
    """Return the estimate as text.

    Args:
        seconds: The parts that are still to be measured, with their seconds.
        options_left_out: Options that add what the defaults leave out.
    """
    text = (
        f"{len(seconds)} parts, about {total(seconds) / 60:.1f} minutes on a GPU such as an H200. "
        f"Assumed, not measured: {ASSUMPTIONS}."
    )
    if options_left_out:
        text += f" Left out unless asked for: {', '.join(options_left_out)}."
    return text


def total(seconds: dict[str, float]) -> float:
    """Return the seconds of a run that measures these parts."""
    return _START + sum(seconds.values())


def part_seconds(settings: BenchSettings) -> dict[str, float]:
    """Return the seconds of each part, by `part_key`, with all contenders that shapes allow."""
    seconds = {}
    compiled: set[tuple[object, ...]] = set()
    for name in settings.shapes:
        contenders = [c for c in settings.contenders if _supports(c, name)]
        for problem in settings.problems(name, torch.device("cuda")):
            once = {cost: s for c in contenders for cost, s in _compilations(c, problem)}
            new = sum(s for cost, s in once.items() if cost not in compiled)
            compiled |= set(once)
            case = new + _case_seconds(problem, contenders, settings.repeats)
            seconds[part_key("cases", case_of(problem))] = case
        seconds[part_key("kept", {"shape": name})] = _CHECK * len(contenders)
    if settings.steps:
        for name in settings.shapes:
            seconds[part_key("steps", {"model": name})] = _MODEL
            seconds[part_key("launches", {"model": name})] = _LAUNCHES
    return seconds


def _supports(contender: str, shape: str) -> bool:
    return contender not in (_ROTATION_ONLY if SHAPES[shape].norm else _NORM_ONLY)


def _compilations(contender: str, problem: Problem) -> list[tuple[tuple[object, ...], float]]:
    """Return what a contender compiles once for a problem and those like it, with the seconds."""
    size = "one" if problem.length == 1 else "few" if problem.length < 1024 else "many"
    of = (contender, problem.shape.name)
    if contender == "hf-compile":
        layout = problem.layout == PACKED
        return [((*of, problem.batch > 1, size == "one", layout), _GRAPH)]
    if contender in ("hf", "ours-reference", "ours-tables"):
        return []
    tuning = [((*of, "tuning"), _TUNING)] if contender == "fla" else []
    return [((*of, size), _TRITON), *tuning]


def _case_seconds(problem: Problem, contenders: list[str], repeats: int) -> float:
    """Return the seconds of a case without compilations."""
    rows = len(contenders) + _COPY_ROWS
    copy = 2 * problem.bytes / _BYTES_PER_SECOND
    checks = len(contenders) * (_CHECK + _FLOAT64_COPIES * copy)
    passes = repeats + _UNCOUNTED_PASSES
    if problem.length == 1:  # one loop in a graph and one without
        return checks + rows * (_CAPTURE + passes * 2 * _CALL)
    multiples = _COPY_ROWS + sum(_COPIES.get(c, _OTHER_COPIES) for c in contenders)
    calls = passes * len(TRAINING) * samples_needed(problem, _L2_BYTES)
    return checks + calls * (rows * _CALL + 2 * multiples * copy)
