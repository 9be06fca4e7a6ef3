"""How long calls take, and how much memory they hold for a moment."""

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

# Cycles that a GPU waits before a call: about a millisecond, in which the CPU queues the call's
# kernels, so that the time is theirs and not that of launching them.
_SLEEP_CYCLES = 2_000_000

# Calls in a row where one alone is shorter than what starts a clock or a graph.
_CALLS_PER_LOOP = 20

_CPU_CACHE = 32 * 2**20  # bytes; torch does not know it, and more does no harm


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    if device.type != "cuda":
        return _CPU_CACHE
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _CPU_CACHE)


def time_calls(calls: list[Thunk]) -> list[float]:
    """Seconds of each call: by the GPU's own clock where there is one.

    What the calls return lives until all are done, so that each writes to memory of its own.
    """
    kept: list[Any] = []
    if not torch.cuda.is_available():
        return [time_call(partial(_append_result, kept, call)) for call in calls]
    events = []
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        kept.append(call())
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _append_result(results: list[Any], call: Thunk) -> None:
    results.append(call())


def unrolled(calls: list[Thunk]) -> Thunk:
    """`_CALLS_PER_LOOP` calls as one, the given ones in rotation."""

    def loop() -> None:
        for i in range(_CALLS_PER_LOOP):
            calls[i % len(calls)]()

    return loop


def wall_time(loop: Thunk) -> list[float]:
    """Seconds of one call within a loop, as a program sees them: with the launching."""
    return [time_call(loop) / _CALLS_PER_LOOP]


def graph_time(graph: Thunk) -> list[float]:
    """Seconds of one call within a graph of a loop."""
    return [time_calls([graph])[0] / _CALLS_PER_LOOP]


def capture_graph(loop: Thunk) -> Thunk:
    """A loop as a CUDA graph, to be replayed."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels compile and libraries set up outside of the graph
        loop()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def peak_memory(call: Thunk) -> int:
    """The most bytes that a call holds at once, beyond what was held before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or some builds of torch report on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    return max(accumulate(memory_changes(profiled)), default=0)


def memory_changes(profiled: Any) -> list[int]:
    """Bytes taken and given back, in order of time."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
