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

# Cycles that a GPU sleeps before a call, at first and at most: about 1 and 70 ms.
_FIRST_SLEEP, _LONGEST_SLEEP = 2_000_000, 128_000_000
_SLEEP_GROWTH = 2

# Calls per loop, where a single call is shorter than the overhead of a clock or a graph.
_CALLS_PER_LOOP = 20

_CPU_CACHE = 32 * 2**20  # bytes; torch does not report it, and too much does no harm


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache, an assumed one where torch does not report it."""
    return l2_bytes(device) or _CPU_CACHE


def l2_bytes(device: torch.device) -> int | None:
    """Return the size of a GPU's L2 cache as torch reports it; None if it does not."""
    if device.type != "cuda":
        return None
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)


class QueueSleep:
    """A GPU's sleep before a call, in which the CPU queues all of the call's kernels.

    Where the sleep ends before the last kernel is queued, the GPU waits for the CPU and the time
    includes launches. Then the calls are repeated, and the sleep is made longer for good if that
    does not help.

    Attributes:
        cycles: Length of the sleep.
        is_covering: Whether the sleep covers the queueing. It cannot where a call waits for the
            device; such calls are timed with the first length.
        is_warm: Whether the calls have run before, so that their compilation does not count.
    """

    def __init__(self) -> None:
        self.cycles = _FIRST_SLEEP
        self.is_covering = True
        self.is_warm = False

    def lengthen(self) -> None:
        """Lengthen the sleep, or give up on covering the queueing."""
        self.cycles *= _SLEEP_GROWTH
        if self.cycles > _LONGEST_SLEEP:
            self.cycles, self.is_covering = _FIRST_SLEEP, False


def time_calls(prepare: Callable[[], list[Thunk]], sleep: QueueSleep) -> list[float]:
    """Return the seconds of each call, by CUDA events if there is a GPU.

    The results live until all calls are done, so that each call writes to different memory.

    Args:
        prepare: Returns the calls; all that is not timed is done before it returns. It is called
            again for each repetition.
        sleep: The sleep before each call; lengthened until it covers the queueing.
    """
    if not torch.cuda.is_available():
        results: list[Any] = []
        return [time_call(partial(_append_result, results, call)) for call in prepare()]
    if not sleep.is_warm:
        _time_queued(prepare(), sleep.cycles)
        sleep.is_warm = True
    is_repetition = False
    while True:
        seconds, is_covered = _time_queued(prepare(), sleep.cycles)
        if is_covered or not sleep.is_covering:
            return seconds
        if is_repetition:  # the first time may have been another process's fault
            sleep.lengthen()
        is_repetition = True


def _time_queued(calls: list[Thunk], cycles: int) -> tuple[list[float], bool]:
    """Return the seconds of each call, and whether every sleep outlasted its call's queueing."""
    results: list[Any] = []
    events = []
    is_covered = True
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        results.append(call())
        is_covered &= not start.query()  # the event behind the sleep has not happened yet
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events], is_covered


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


def graph_time(graph: Thunk, sleep: QueueSleep) -> list[float]:
    """Return the seconds of one call within a CUDA graph of a loop."""
    return [time_calls(lambda: [graph], sleep)[0] / _CALLS_PER_LOOP]


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
