"""Time and peak memory of calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rope_patch.evaluation.measures.timed_method import time_call

Thunk = Callable[[], Any]

# Cycles that a GPU sleeps before a call: about a millisecond, in which the CPU queues the call's
# kernels, so that their time excludes the launches.
_SLEEP_CYCLES = 2_000_000

# Calls per loop, where a single call is shorter than the overhead of a clock or a graph.
_CALLS_PER_LOOP = 20

_CPU_CACHE = 32 * 2**20  # bytes; torch does not report it, and too much does no harm


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache."""
    if device.type != "cuda":
        return _CPU_CACHE
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _CPU_CACHE)


def time_calls(calls: list[Thunk]) -> list[float]:
    """Return the seconds of each call, by CUDA events if there is a GPU.

    The results live until all calls are done, so that each call writes to different memory.
    """
    results: list[Any] = []
    if not torch.cuda.is_available():
        return [time_call(partial(_append_result, results, call)) for call in calls]
    events = []
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        results.append(call())
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _append_result(results: list[Any], call: Thunk) -> None:
    results.append(call())


def unrolled(calls: list[Thunk]) -> Thunk:
    """Return a call that runs `_CALLS_PER_LOOP` of the calls, in rotation."""

    def loop() -> None:
        for i in range(_CALLS_PER_LOOP):
            calls[i % len(calls)]()

    return loop


def wall_time(loop: Thunk) -> list[float]:
    """Return the seconds of one call within a loop, launches included."""
    return [time_call(loop) / _CALLS_PER_LOOP]


def graph_time(graph: Thunk) -> list[float]:
    """Return the seconds of one call within a CUDA graph of a loop."""
    return [time_calls([graph])[0] / _CALLS_PER_LOOP]


def capture_graph(loop: Thunk) -> Thunk:
    """Capture a loop in a CUDA graph; return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up outside of the graph: compilation, library setup
        loop()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def peak_memory(call: Thunk) -> int:
    """Return the peak bytes of a call, beyond those held before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else some builds of torch log to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return max(accumulate(memory_changes(profiler)), default=0)


def memory_changes(profiler: Any) -> list[int]:
    """Return the bytes allocated (positive) and freed (negative), in order of time."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
