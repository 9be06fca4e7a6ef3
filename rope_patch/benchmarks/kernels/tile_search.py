"""Search for launches that are faster on this device, for `ops.kernels.launch_choices`.

Every candidate is compared with float64 and timed a few times; the fastest ones are then timed
again, in turns with today's launch, and only these new times decide. A row is written where all of
them are shorter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rope_patch.benchmarks.kernels.benchmark import current_device
from rope_patch.benchmarks.kernels.implementations import builtin_implementations, describe_error
from rope_patch.benchmarks.kernels.problems import (
    SHAPES,
    TOLERANCES,
    VIEWS,
    Problem,
    Shape,
    samples_needed,
)
from rope_patch.benchmarks.kernels.timing import FORWARD, GRAPH, Clock, ImplementationRun
from rope_patch.benchmarks.kernels.timing import cache_bytes as last_level_cache_bytes
from rope_patch.evaluation.measures.speed import compare_times
from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason
from rope_patch.ops.kernels.launch_choices import LaunchChoice, Row, device_class, force_choice
from rope_patch.utils.atomic_files import write_json
from rope_patch.utils.errors import Refused
from rope_patch.utils.processes import free_memory

_DTYPE = torch.bfloat16
_TRIALS = 3  # times of each candidate in the first round
_FINALISTS = 3
_NEEDED = 0.98  # of today's time: less is within what two runs of one launch differ by


def search_tiles(
    shapes: tuple[str, ...],
    lengths: tuple[int, ...],
    repeats: int,
    path: Path,
    candidates: int | None = None,
) -> dict[str, Any]:
    """Measure launches of forward passes; what is in the file already is not measured again.

    Args:
        shapes: Names of `problems.SHAPES`.
        lengths: Tokens.
        repeats: Times of each finalist.
        path: File of the results, written after each size: `measured`, a result for each size, and
            `table`, this device's rows for `launch_choices.json`.
        candidates: Try only so many candidates; None: all.

    Returns:
        What the file has.

    Raises:
        Refused: There is neither a GPU nor Triton's interpreter, or the file is another device's.
    """
    device = current_device()
    if (problem := triton_unavailable_reason()) or (device.type == "cpu" and not is_interpreted()):
        raise Refused(
            f"tiles are Triton's, but {problem or 'torch finds no GPU here'}: run it on a machine "
            "with one, or set TRITON_INTERPRET=1"
        )
    name = device_class(device)
    results: dict[str, Any] = {"device": name, "measured": [], "table": {name: []}}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["device"] != name:
            raise Refused(f"{path} is of {results['device']}, got {name}: give another --out")
    before = {(case["shape"], case["tokens"]) for case in results["measured"]}
    for shape in shapes:
        for above, tokens in zip((0, *sorted(lengths)), sorted(lengths), strict=False):
            if (shape, tokens) in before:
                continue
            measured = _measure(SHAPES[shape], tokens, device, repeats, candidates)
            results["measured"].append({"shape": shape, "tokens": tokens, **measured})
            if winner := measured["winner"]:
                results["table"][name].append(_row(SHAPES[shape], above, tokens, winner))
            write_json(path, results)
            free_memory()
    return results


def _candidates(heads: int) -> Iterator[LaunchChoice]:
    """Yield the launches that are tried."""
    for tile in (1, 2, 4, 8, 16, 32):
        if tile < 2 * heads:
            yield from (LaunchChoice(tile, True, warps) for warps in (1, 2, 4, 8))
            if tile > 2:  # a program that loops over smaller ones takes long for a token
                for warps in (1, 4):
                    yield from (LaunchChoice(tile, False, warps, stages) for stages in (1, 2, 3))


def _measure(
    shape: Shape, tokens: int, device: torch.device, repeats: int, candidates: int | None
) -> dict[str, Any]:
    """Return the finalists' times as parts of today's, and the winner, None if there is none."""
    problem = Problem(
        shape=shape, batch=1, length=tokens, layout=VIEWS, dtype=_DTYPE, device=device
    )
    count = 1 if is_interpreted() else samples_needed(problem, last_level_cache_bytes(device))
    samples = [problem.sample(seed) for seed in range(count)]
    ours = next(each for each in builtin_implementations() if each.name == "ours")
    worker = ImplementationRun(ours, problem, samples)
    clocks: dict[LaunchChoice | None, Clock] = {}
    failed = {}
    tried = list(_candidates(max(shape.heads, shape.key_heads)))[:candidates]
    for choice in (None, *tried):
        try:
            with force_choice(choice, _launchers()):
                errors = worker.relative_errors()
                if not all(error <= TOLERANCES[_DTYPE] for error in errors.values()):
                    raise ValueError(f"errors of {errors}, expected {TOLERANCES[_DTYPE]}")
                clock = worker.clock(GRAPH if tokens == 1 and device.type == "cuda" else FORWARD)
                clock()  # compiles
                clocks[choice] = clock
        except Exception as error:  # a compiler can raise anything; try the others
            if choice is None:
                raise
            failed[str(choice)] = describe_error(error)
    first = _time(clocks, _TRIALS)
    order = sorted(clocks, key=lambda choice: median(map(median, first[choice])))
    finalists = [choice for choice in order if choice is not None][:_FINALISTS]
    times = _time({choice: clocks[choice] for choice in (None, *finalists)}, repeats)
    rows: list[dict[str, Any]] = [
        {"choice": asdict(choice), **compare_times(times[choice], times[None])}
        for choice in finalists
        if choice is not None
    ]
    best = min(rows, key=lambda row: row["ratio"], default=None)
    wins = best is not None and best["ratio"] < _NEEDED and best["max"] < 1
    default_ms = 1e3 * median(map(median, times[None]))
    return {
        "default_ms": default_ms,
        "finalists": rows,
        "failed": failed,
        "winner": best if wins else None,
    }


def _time(
    clocks: dict[LaunchChoice | None, Clock], repeats: int
) -> dict[LaunchChoice | None, list[list[float]]]:
    """Return the seconds of each choice's calls, a list a repeat, taken in turns."""
    seconds: dict[LaunchChoice | None, list[list[float]]] = {choice: [] for choice in clocks}
    for repeat in range(repeats):
        for choice in list(clocks)[:: -1 if repeat % 2 else 1]:
            with force_choice(choice, _launchers()):
                seconds[choice].append(clocks[choice]())
    return seconds


def _launchers() -> tuple[Any, ...]:
    """Return the launchers of the kernels that have choices."""
    from rope_patch.ops.kernels import qk_norm_rope, rope

    return rope._launcher, qk_norm_rope._forward_launcher


def _row(shape: Shape, above: int, tokens: int, winner: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table with its time."""
    row = Row(
        kernel="qk_norm_rope" if shape.norm else "rope",
        heads=(shape.heads, shape.key_heads),
        head_dim=shape.head_dim,
        dtype=str(_DTYPE).removeprefix("torch."),
        above=above,
        up_to=tokens,
        choice=LaunchChoice(**winner["choice"]),
    )
    return {**asdict(row), "microseconds": round(1e3 * winner["ms"], 3)}
